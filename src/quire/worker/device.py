"""Device: where a step is computed, and what all devices share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.batch import Batch
from quire.config.engine import EngineConfig
from quire.data.plan import Ints, Pending, StepPlan
from quire.errors import EngineDead
from quire.sampling.chance import Asked
from quire.sampling.sampler import Sampled, Sampler
from quire.worker.memory import Needs
from quire.worker.rows import Rows
from quire.worker.sheet import slots_of


class Computed(NamedTuple):
    """What a step gave on the device."""

    hidden: Tensor
    """[T, hidden]"""
    logits: Tensor
    """[N, vocab], a row for each sequence that samples"""
    token_ids: Tensor | None = None
    """[N], where tokens are sampled in passing"""
    asked: Asked | None = None


@contextmanager
def device_failures() -> Iterator[None]:
    """The device's state is lost with such an error, and with it every request."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise EngineDead(f"the device failed: {error}") from error


class Device(Protocol):
    """Where steps are computed: what the worker asks of a CPU or a GPU."""

    @property
    def sample(self) -> Callable[[Tensor, Asked], Tensor] | None:
        """How tokens are sampled in passing."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler) -> Needs:
        """Memory of the largest step, and of any that asks for more. The layers have some small cache by
        now."""

    def warm_up(self, config: EngineConfig) -> None:
        """The cache is there: get ready for the first request."""

    def prepare(self, plan: StepPlan, all_rows: Rows) -> Callable[[], Computed]:
        """The step, ready to run."""

    def land(self, plan: StepPlan, sampled: Sampled, all_rows: Rows) -> Pending:
        """Bring the sampled tokens back; called before the rows advance."""


@dataclass(slots=True)
class Model:
    """A model's two halves and its attention."""

    forward: Callable[[Batch], Tensor]
    head: Callable[[Tensor], Tensor]
    attention: AttentionBackend

    def hidden(self, batch: Batch) -> Tensor:
        """[T, hidden]"""
        for group in batch.groups:
            self.attention.plan(group)
        return self.forward(batch)


class NewTokens(NamedTuple):
    """Which rows get a token in a step, and where it stands."""

    step: int
    rows: NDArray[np.intp]
    places: Ints

    @staticmethod
    def of(plan: StepPlan, all_rows: Rows) -> "NewTokens":
        rows = plan.sampling_rows.astype(np.intp)
        return NewTokens(plan.step, rows, all_rows.num_tokens[rows])


def batch_of(sheet: dict[str, Tensor], block_tables: Tensor, query_lens: Ints, seq_lens: Ints) -> Batch:
    """`block_tables` [groups of layers, rows, blocks]"""
    batch = Batch(
        token_ids=sheet["token_ids"],
        positions=sheet["positions"],
        slots=sheet["slots"],
        query_starts=sheet["query_starts"],
        seq_lens=sheet["seq_lens"],
        rows=sheet["rows"],
        block_tables=block_tables[0],
        logit_tokens=sheet["logit_tokens"],
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    batch.others = tuple(
        replace(batch, slots=sheet[slots_of(group)], block_tables=block_tables[group])
        for group in range(1, len(block_tables))
    )
    return batch
