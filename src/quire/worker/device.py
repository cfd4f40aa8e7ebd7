"""Device: where a step is computed, and what all devices share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from quire.sampling.draw import Draws
from quire.sampling.sampler import Sampled
from quire.worker.memory import Needs
from quire.worker.rows import Rows


class Computed(NamedTuple):
    hidden: Tensor
    """[T, hidden]"""
    logits: Tensor
    """[N, vocab], a row for each sequence that samples"""
    picked: Tensor | None = None
    """[N], where tokens are picked in passing"""
    draws: Draws | None = None


@contextmanager
def device_failures() -> Iterator[None]:
    """The device's state is lost with such an error, and with it every request."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise EngineDead(f"the device failed: {error}") from error


class Device(Protocol):
    @property
    def pick(self) -> Callable[[Tensor, Draws], Tensor] | None:
        """How tokens are picked in passing."""

    def needs(self, config: EngineConfig, weights: int) -> Needs:
        """Memory of the largest step. The layers have some small cache by now."""

    def warm_up(self, config: EngineConfig) -> None:
        """The cache is there: get ready for the first request."""

    def prepare(self, plan: StepPlan, all_rows: Rows) -> Callable[[], Computed]:
        """The step, ready to run."""

    def land(self, plan: StepPlan, sampled: Sampled, all_rows: Rows) -> Pending:
        """Bring the drawn tokens back; called before the rows advance."""


@dataclass(slots=True)
class Model:
    """A model's two halves and its attention."""

    forward: Callable[[Batch], Tensor]
    head: Callable[[Tensor], Tensor]
    attention: AttentionBackend


class Draw(NamedTuple):
    """Which rows drew in a step, and where their tokens stand."""

    step: int
    rows: NDArray[np.intp]
    places: Ints

    @staticmethod
    def of(plan: StepPlan, all_rows: Rows) -> "Draw":
        rows = plan.drawing.astype(np.intp)
        return Draw(plan.step, rows, all_rows.num_tokens[rows])


def batch_of(sheet: dict[str, Tensor], block_tables: Tensor, query_lens: Ints, seq_lens: Ints) -> Batch:
    names = ("token_ids", "positions", "slots", "query_starts", "seq_lens", "rows", "logit_tokens")
    return Batch(
        **{name: sheet[name] for name in names},
        block_tables=block_tables,
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
