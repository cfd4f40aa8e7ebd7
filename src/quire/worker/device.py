"""Device: where a step is computed, and what all devices share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.batch import Batch
from quire.config.engine import EngineConfig
from quire.data.plan import Ints, Masks, Pending, StepPlan, StepResult
from quire.errors import EngineDead
from quire.layers.lora import AdapterSlots
from quire.parallel.all2all import ExpertDispatch
from quire.sampling.random import SamplingTensors
from quire.sampling.sampler import Sampled, Sampler
from quire.sampling.transfer import to_device
from quire.worker.input_buffers import BufferSizes, blank, bytes_of, host_arrays, slots_of, tensors
from quire.worker.memory import Needs
from quire.worker.multimodal.bidirectional import reach_of
from quire.worker.multimodal.embeds import take_embeds
from quire.worker.multimodal.encoder import MediaEncoder
from quire.worker.rows import Rows
from quire.worker.spec.drafter import Drafter
from quire.worker.spec.progress import DraftProgress


class ForwardResult(NamedTuple):
    """What a step gave on the device."""

    hidden: Tensor
    """[T, hidden]"""
    logits: Tensor
    """[N, vocab], a row for each sequence that samples"""
    token_ids: Tensor | None = None
    """[N], where tokens are sampled in passing"""
    asked: SamplingTensors | None = None
    rows: Tensor | None = None
    """[N] int64, whose logits these are"""
    given: Any = None
    """What it was computed from, where the device makes its own inputs."""
    aux_hidden_states: tuple[Tensor, ...] = ()
    """See `Batch.aux_hidden_states`."""
    follow: Callable[[], Tensor] | None = None
    """What is done with tokens that were sampled in passing, where it was captured."""
    found: Tensor | None = None
    """What became of drafts by these tokens, where that was looked at in passing, too."""
    redraw: Callable[[], Tensor] | None = None
    """Samples [N] by the masks that lie on the device, where that was captured."""


class UnsampledRows:
    """A step whose rows wait to hear what they may sample."""

    def __init__(self, plan: StepPlan, done: ForwardResult) -> None:
        self.plan = plan
        self.done = done
        self.drawn: Pending | None = None

    def ready(self, timeout_s: float) -> bool:
        assert self.drawn is not None, "nobody said what its rows may sample"
        return self.drawn.ready(timeout_s)

    def wait(self) -> StepResult:
        assert self.drawn is not None, "nobody said what its rows may sample"
        return self.drawn.wait()


@contextmanager
def device_failures(kinds: tuple[type[Exception], ...] = (torch.AcceleratorError,)) -> Iterator[None]:
    """The device's state is lost with such an error, and with it every request."""
    try:
        yield
    except EngineDead:
        raise
    except kinds as error:
        raise EngineDead(f"the device failed: {error}") from error


Passed = tuple[Tensor, Tensor]
"""What a stage hands to the next, [T, hidden] each: what its last layer said, and what that is added to."""


class Neighbours(Protocol):
    """The stages before and behind this one, as a device sees them."""

    num_stages: int
    is_first: bool
    is_last: bool

    def room(self, num_tokens: int) -> Tensor:
        """[2, tokens, hidden]"""

    def num_bytes(self, num_tokens: int) -> int: ...

    def receive(self, into: Tensor) -> None: ...


@dataclass(slots=True)
class DeviceStep:
    """A step that is ready to run once the stage before has sent what it needs."""

    run: Callable[[], Any]
    before: Tensor | None = None
    """Where that goes."""
    receive: Callable[[Tensor], None] | None = None

    def forward(self) -> Passed:
        """The layers of a stage that is not the last. The next step may write to the same memory."""
        if self.before is not None and self.receive is not None:
            self.receive(self.before)
        passed: Passed = self.run()
        return passed

    def draw(self) -> ForwardResult:
        """The last layers, and the tokens that come of them."""
        if self.before is not None and self.receive is not None:
            self.receive(self.before)
        done: ForwardResult = self.run()
        return done


class Device(Protocol):
    """Where steps are computed: what the worker asks of a CPU or a GPU."""

    @property
    def sample(self) -> Callable[[Tensor, SamplingTensors], Tensor] | None:
        """How tokens are sampled in passing."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler | None, bound: int = 0) -> Needs:
        """Memory of the largest step, and of any that asks for more; a stage before the last has no sampler.
        The layers have some small cache by now, of `bound` bytes, which will be gone."""

    def warm_up(self, config: EngineConfig) -> None:
        """The cache is there: get ready for the first request."""

    def draft_by(
        self, drafter: Drafter, seen: DraftProgress | None, max_tokens: int, *, by_chance: bool
    ) -> None:
        """It proposes tokens in front of steps that want some, the likeliest or `by_chance`. What one that
        does not follow has `seen` is noted; of what it missed it computes so many tokens in a step."""

    def forget(self) -> None:
        """Weights and cache will lie elsewhere: let go of all that knows where they are."""

    def prepare(self, plan: StepPlan, all_rows: Rows) -> DeviceStep:
        """The step, ready to run."""

    def redraw(self, done: ForwardResult, masks: Masks, places: Ints) -> Tensor | None:
        """Tokens by masks, the quick way; None if there is none. `places` [max_rows] of rows in the step."""

    def land(self, plan: StepPlan, done: ForwardResult, sampled: Sampled, all_rows: Rows) -> Pending:
        """Bring the sampled tokens back; called before the rows advance."""


@dataclass(slots=True)
class Model:
    """A model's two halves and its attention, or what a stage has of them."""

    forward: Callable[[Batch], Any]
    head: Callable[[Tensor], Tensor]
    attention: AttentionBackend
    link: Neighbours | None = None
    """None: all layers are here."""
    ep: ExpertDispatch | None = None
    """The way to experts on other devices, if some are there."""
    adapters: AdapterSlots | None = None
    """Those that requests may ask for."""
    encoder: MediaEncoder | None = None
    """What it sees or hears with."""
    reaches: bool = False
    """Whether the tokens of an item see each other in both directions."""

    @property
    def draws(self) -> bool:
        """Whether it has the head."""
        return self.link is None or self.link.is_last

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether rows of a step have adapters: no, and where some may, yes."""
        return (False,) if self.adapters is None else (False, True)

    def without_adapters(self) -> None:
        """What is computed next has none: drafts may come from the ends of the model."""
        if self.adapters is not None:
            self.adapters.use()

    def head_of_one(self, states: Tensor) -> Tensor:
        """Logits where all have one adapter, if any could have: that of the first slot."""
        if self.adapters is not None:
            self.adapters.use(logit_tokens=torch.zeros(len(states), dtype=torch.int32, device=states.device))
        return self.head(states)

    def room(self, num_tokens: int) -> Tensor | None:
        """For what the stage before makes of so many tokens; None if there is none."""
        return None if self.link is None or self.link.is_first else self.link.room(num_tokens)

    def embeds(self, plan: StepPlan, all_rows: Rows, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """See `Batch.embeds`; None, too, in a stage that reads no tokens. What the plan has encoded is."""
        if self.link is not None and not self.link.is_first:
            return None
        found = take_embeds(plan, all_rows, device)
        if self.encoder is None:
            return found
        return self.encoder.joined(found, self.encoder.step(plan, all_rows))

    def reach(self, plan: StepPlan, all_rows: Rows, device: torch.device) -> Tensor | None:
        """See `Batch.reach`; asked for before `embeds`, with which items are done with."""
        if not self.reaches or not (all_rows.items or all_rows.wholes):
            return None
        found = reach_of(plan, all_rows)
        return None if found is None else to_device(found, device)

    def adapts(self, plan: StepPlan, all_rows: Rows) -> bool:
        """Whether some row of a step has an adapter."""
        return self.adapters is not None and bool((all_rows.adapter[plan.rows] >= 0).any())

    def is_wide(self, plan: StepPlan, all_rows: Rows) -> bool:
        """Whether some row has an adapter with tokens of its own, for which nothing is taped or captured."""
        return self.adapters is not None and bool(self.adapters.has_own[all_rows.adapter[plan.rows]].any())

    def step(self, run: Callable[[], Any], before: Tensor | None) -> DeviceStep:
        return DeviceStep(run) if self.link is None else DeviceStep(run, before, self.link.receive)

    def hidden(self, batch: Batch) -> Any:
        """[T, hidden], or what is to be passed on."""
        for group in batch.groups:
            group.reach = batch.reach
            self.attention.plan(group)
        if batch.embeds is not None:
            batch.token_ids = batch.token_ids.clamp(min=0)
        if self.ep is not None:
            self.ep.plan(batch.num_real, batch.room)
        if self.adapters is not None:
            self.adapters.use(batch.adapters, batch.logit_adapters, is_wide=batch.is_wide)
        return self.forward(batch)


class NewTokens(NamedTuple):
    """Which rows get tokens in a step."""

    step: int
    rows: NDArray[np.intp]

    @staticmethod
    def of(plan: StepPlan) -> "NewTokens":
        return NewTokens(plan.step, plan.sampling_rows.astype(np.intp))


def hold(drawn: Ints, drafts: Ints, num_drafts: Ints) -> Ints:
    """How many of the tokens that each row drew count: those up to the first draft that is another. A row has
    one draw more than drafts."""
    num_draws = 1 + num_drafts
    lasts = np.cumsum(num_draws) - 1
    differs = np.ones(len(drawn), np.bool_)
    is_draft = np.ones(len(drawn), np.bool_)
    is_draft[lasts] = False
    differs[is_draft] = drawn[is_draft] != drafts
    first = np.flatnonzero(differs)  # one in each row at least, its last draw
    found: Ints = first[np.searchsorted(first, lasts - num_drafts)] - (lasts - num_drafts) + 1
    return found.astype(np.int32)


def batch_of(
    sheet: dict[str, Tensor],
    block_tables: Tensor,
    query_lens: Ints,
    seq_lens: Ints,
    *,
    are_decodes: bool = False,
    are_any: bool = False,
) -> Batch:
    """`block_tables` [groups of layers, rows, blocks]"""
    turns = sheet.get("turns")
    if turns is not None and len(turns) > len(sheet["positions"]):
        turns = turns.view(3, -1)
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
        turns=turns,
        adapters=sheet.get("adapters"),
        logit_adapters=sheet.get("logit_adapters"),
        are_decodes=are_decodes,
        are_any=are_any,
    )
    batch.others = tuple(
        replace(batch, slots=sheet[slots_of(group)], block_tables=block_tables[group])
        for group in range(1, len(block_tables))
    )
    return batch


def blank_batch(
    lens: Ints,
    block_tables: Tensor,
    device: torch.device,
    *,
    num_samples: int | None = None,
    drafts: bool = False,
    adapters: bool = False,
    axes: int = 0,
) -> tuple[Batch, dict[str, Tensor]]:
    """A step of sequences that read the first block and write nothing; all of them sample, or so many. With
    `adapters` it takes the way of those, although no token has one."""
    num_groups, num_rows, _ = block_tables.shape
    num_samples = len(lens) if num_samples is None else num_samples
    sizes = BufferSizes(
        int(lens.sum()), len(lens), num_samples, 0, num_groups, adapters, drafts=drafts, axes=axes
    )
    memory = torch.zeros(bytes_of(sizes), dtype=torch.uint8)
    arrays = host_arrays(memory, sizes)
    blank(arrays, 0, num_rows - 1, 0)
    np.cumsum(lens, out=arrays["query_starts"][1:])
    arrays["logit_tokens"][:] = arrays["query_starts"][1:][: sizes.samples] - 1
    arrays["seq_lens"][:] = lens
    sheet = tensors(memory.to(device), sizes)
    return batch_of(sheet, block_tables, lens, lens), sheet


ONE_TOKEN: Ints = np.ones(1, np.int32)
"""What a step without rows computes."""
