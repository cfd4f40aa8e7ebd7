"""What a step is: the plan that goes to the worker, and the result that comes back."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.data.async_value import AsyncValue
from quire.data.lora import LoRARequest
from quire.data.multimodal import Media, MediaItem
from quire.data.params import SamplingParams
from quire.data.pooling import Pooled, PoolingParams
from quire.data.prompt_embeds import PromptEmbeds
from quire.data.stats import StepStats

Ints = NDArray[np.int32]
_NONE: Ints = np.empty(0, np.int32)
_NO_VALUES: Ints = np.empty((2, 0), np.int32)
_NO_BITS: NDArray[np.uint32] = np.empty((0, 0), np.uint32)


def spread(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """From each of `starts` on, so many numbers in succession."""
    firsts = np.cumsum(counts) - counts
    found: NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
    return found


Verdict = Literal["", "complete", "eos", "error", "limit"]
"""What a grammar makes of a token: go on, the text is whole with it, it is the one that ends it, it does not
fit, or the grammar has grown beyond the limits of the library that follows it."""


class Masks(msgspec.Struct):
    """What some rows of a step may sample; the others what they like."""

    rows: Ints = _NONE
    bits: NDArray[np.uint32] = _NO_BITS
    """[rows, words] token t is bit t % 32 of word t // 32; there may be fewer or more bits than tokens."""
    draws: Ints = _NONE
    """For which of its draws, from 0 on, each row has this mask; empty: each for its first."""
    coming: AsyncValue | None = None
    """The bits, which are still being filled; None: they are there."""

    def wait(self) -> None:
        """Until they are."""
        if self.coming is not None:
            self.coming.wait()
            self.coming = None


class Admission(msgspec.Struct):
    """A request that takes a row: everything the worker needs to know of it, sent once."""

    row: int
    request_id: str
    token_ids: list[int]
    """Prompt, and for a request that was preempted the output so far."""
    prompt_len: int
    num_computed: int
    """How many of them the prefix cache already holds."""
    block_ids: list[list[int]]
    """By group of layers, as many in each; 0 is none: no token will look there."""
    params: SamplingParams
    seed: int
    """The request's own random stream; every sample is a function of (seed, position)."""
    stop_ids: tuple[int, ...] = ()
    """What `min_tokens` must hold back: the end-of-sequence ids and stop_token_ids."""
    embeds: PromptEmbeds | None = None
    """The prompt as vectors, in place of its token ids."""
    media: Media | None = None
    """Images, videos and sounds of the prompt, without arrays: what the plans encode is told by key."""
    pooling: PoolingParams | None = None
    """Instead of a new token, what the request wants of its hidden states."""
    adapter: int = -1
    """The slot of its adapter; -1: it has none."""


class LoRAAssignment(msgspec.Struct):
    """An adapter on its way into a slot of the device; whatever was there goes."""

    slot: int
    adapter: LoRARequest


class StepPlan(msgspec.Struct):
    """One step. Apply in this order: release rows, admit rows, append blocks, learn values, then compute.

    The step before it may still run: a row that got a token there counts it, and computes it here, before
    anybody on the host knows which one it is. Not so with pipeline stages: there a row waits for its value.
    """

    step: int
    released: list[int]
    admitted: list[Admission]
    block_rows: Ints
    """Row of each new block, grouped by row and in order of position."""
    block_ids: Ints
    """[groups of layers, len(block_rows)]"""
    rows: Ints
    """The rows that compute in this step, in batch order."""
    num_tokens: Ints
    """How many tokens each of `rows` computes, from its num_computed on."""
    samples: NDArray[np.bool_]
    """Whether the row's last token is computed, so that it gets a new one, or more."""
    num_drafts: Ints = _NONE
    """How many of the tokens of each of `rows`, the last of them, are drafts: each is kept if the row draws
    the same there. Empty: none has any."""
    drafts: Ints = _NONE
    """Those of all rows, one after the other. Empty: the worker has made them itself."""
    values: Ints = _NO_VALUES
    """[2, rows]: rows and the last token of each, where a stage that has not sampled it needs to know it."""

    constrained: Ints = _NONE
    """The rows that sample by a grammar. What they may sample depends on tokens that may still be under way:
    it follows, as `Masks`, and no row samples before."""

    adapters: list[LoRAAssignment] = []
    """What goes into slots before anything is computed; each worker has read it by now."""

    forgotten: list[bytes] = []
    """Keys of items whose vectors are not needed any more; before anything is encoded."""
    encodes: list[MediaItem] = []
    """Items that go through their towers first, each once; their vectors stay until they are forgotten."""

    counts: tuple[int, ...] = ()
    """Tokens of this step on each of the engines that step together; empty: there are no others. Without rows
    it is a step for the sake of the others."""

    total_tokens: int = 0
    sampling_rows: Ints = _NONE
    """The rows that get new tokens."""
    logit_rows: Ints = _NONE
    """The row of each draw: one for each row that samples, and one more for each of its drafts."""
    query_len: int = 0
    """How many tokens each row computes, and draws behind each of them; 0 if they are not alike."""

    def __post_init__(self) -> None:
        """Asked for in many places of a step, and counted here once."""
        all_sample = bool(self.samples.all())
        self.total_tokens = int(self.num_tokens.sum())
        self.sampling_rows = self.logit_rows = self.rows if all_sample else self.rows[self.samples]
        if len(self.num_drafts):
            self.logit_rows = np.repeat(self.sampling_rows, 1 + self.num_drafts[self.samples])
        if all_sample and len(self.logit_rows) == self.total_tokens and len(self.rows):
            each, rest = divmod(self.total_tokens, len(self.rows))
            self.query_len = each if not rest and (self.num_tokens == each).all() else 0

    def drafts_by_row(self) -> dict[int, list[int]]:
        """Those that the planner made."""
        tokens = iter(self.drafts.tolist())
        counts = zip(self.rows.tolist(), self.num_drafts.tolist(), strict=True)
        return {row: list(islice(tokens, count)) for row, count in counts if count}

    @property
    def is_decode(self) -> bool:
        """Whether each row computes one token and gets one."""
        return self.query_len == 1

    @staticmethod
    def idle(step: int) -> "StepPlan":
        """One without rows."""
        return StepPlan(step, [], [], _NONE, _NONE.reshape(1, 0), _NONE, _NONE, np.empty(0, np.bool_))


class RowLogprobs(msgspec.Struct):
    """Logprobs of one position: the sequence's own token first, then the requested best in falling order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of that token in the whole vocabulary, 1 is best."""


class StepResult(msgspec.Struct):
    """What the worker computed for a plan."""

    token_ids: Ints
    """The new tokens of each row of the plan with `samples`, in the plan's order; none of a pooling model."""
    counts: Ints = _NONE
    """How many they are: what a row drew up to the first draft that it did not. Empty: one each."""
    logprobs: dict[int, list[RowLogprobs]] = {}
    """By row, for the rows that asked, and by new token."""
    prompt_logprobs: dict[int, list[RowLogprobs]] = {}
    """By row: the positions that this step's chunk covered, in order."""
    pooled: dict[int, Pooled] = {}
    """Of a pooling model, by row: for each row with `samples` what has come of its prompt."""
    drafted: Ints = _NONE
    """How many of its planned drafts each row with `samples` had; empty: all of them."""
    aligned: dict[int, list[int]] = {}
    """By row whose prompt was aligned: the state of its sound at which each token begins."""


class Pending(Protocol):
    """A step that was launched."""

    def ready(self, timeout_s: float) -> bool:
        """Wait for it up to so long; whether it is done."""

    def wait(self) -> StepResult:
        """Blocks until the step is done; raises what the step raised."""


DEAD_END = "grammar"
"""The stop_reason of an error whose cause is the request's own grammar."""
TOO_COMPLEX = "grammar limit"
"""The stop_reason of an error for a grammar that the grammar library could not follow to its end."""


class FinishReason(msgspec.Struct):
    """Why a sequence ended."""

    reason: str
    """stop | length | abort | error | repetition"""
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    keeps_last: bool = False
    """It stopped, and not by its last token: the text was whole."""


class FirstRun(msgspec.Struct):
    """A request ran for the first time. Times are monotonic seconds."""

    num_cached: int
    """Prompt tokens that the prefix cache held."""
    queued_at: float
    scheduled_at: float


class StepOutput(msgspec.Struct, omit_defaults=True):
    """What a step means to the requests, in columns: `token_ids[i]` is the new token of `request_ids[i]`."""

    request_ids: list[str]
    token_ids: list[int]
    counts: list[int] = []
    """How many of the tokens, one after the other, each of the requests got. Empty: one each."""
    finished: dict[str, FinishReason] = {}
    logprobs: dict[str, list[RowLogprobs]] = {}
    """By new token."""
    drafted: dict[str, int] = {}
    """Of requests that had drafts: how many. The tokens that they got, but the last, are those that held."""
    prompt_logprobs: dict[str, list[RowLogprobs]] = {}
    aligned: dict[str, list[int]] = {}
    pooled: dict[str, Pooled] = {}
    """What came of the prompts of a pooling model; each such request is among `finished`."""
    admitted: dict[str, FirstRun] = {}
    """Requests that ran for the first time."""
    resumed: dict[str, float] = {}
    """Requests that were preempted and run again: the seconds that they were away."""
    shares: dict[str, float] = {}
    """Of requests that are timed: the seconds of this step that their tokens took, of all its tokens."""
    at: float = 0.0
    """When the step ended, monotonic."""
    stats: StepStats = msgspec.field(default_factory=StepStats)

    def by_request(self) -> Iterator[tuple[str, list[int]]]:
        """The new tokens of each."""
        if not self.counts:
            return zip(self.request_ids, ([token_id] for token_id in self.token_ids), strict=True)
        tokens = iter(self.token_ids)
        return zip(self.request_ids, (list(islice(tokens, count)) for count in self.counts), strict=True)
