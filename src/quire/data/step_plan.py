"""The plan of a step, which goes to the worker, and its result."""

from collections.abc import Hashable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.data.async_value import AsyncValue
from quire.data.kv_tiers import BlockStores
from quire.data.lora import LoRARequest
from quire.data.multimodal import Media, MediaItem
from quire.data.params import SamplingParams
from quire.data.pooling import Pooled, PoolingParams
from quire.data.prefix_miss import PrefixMiss
from quire.data.prompt_embeds import PromptEmbeds
from quire.data.routed_experts import RoutedRows, StepRoutes
from quire.data.stats import StepStats

Owner = TypeVar("Owner", bound=Hashable)
Ints = NDArray[np.int32]
_NONE: Ints = np.empty(0, np.int32)
_NO_VALUES: Ints = np.empty((2, 0), np.int32)
_NO_BITS: NDArray[np.uint32] = np.empty((0, 0), np.uint32)


def spread(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return one array that concatenates, for each i, the numbers from `starts[i]` to `starts[i] + counts[i]
    - 1`."""
    firsts = np.cumsum(counts) - counts
    numbers: NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
    return numbers


Verdict = Literal["", "complete", "eos", "error", "limit"]
"""State of a grammar after a token. Empty: the text may continue; `complete`: the text is complete; `eos`:
the token is eos; `error`: the token is invalid; `limit`: the grammar exceeds the limits of the grammar
library."""


class Masks(msgspec.Struct):
    """Bit masks of the allowed tokens, for the rows (running requests) of a step that a grammar
    constrains."""

    rows: Ints = _NONE
    bits: NDArray[np.uint32] = _NO_BITS
    """Bit masks [masks, words]: token t is bit t % 32 of word t // 32. There may be fewer or more bits than
    tokens in the vocabulary."""
    sample_index: Ints = _NONE
    """Index of each mask's sample among the samples of its row, which has several samples if it has draft
    tokens. Empty: every mask is for the first sample of its row."""
    pending: AsyncValue | None = None
    """Signal of the thread that fills `bits`; None if `bits` are complete."""

    def wait_for_bits(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class Admission(msgspec.Struct):
    """A request that gets a row, which is its index in the batch state of the worker. It has all data of the
    request for the worker, and is sent once."""

    row: int
    request_id: str
    token_ids: list[int]
    """Prompt tokens, followed by the output so far if the request was preempted."""
    prompt_len: int
    num_computed: int
    """Number of `token_ids` that are in the prefix cache."""
    block_ids: list[list[int]]
    """KV block ids for each group of layers (layers with the same attention window), equally many in each. 0:
    no block, because no token attends to it."""
    params: SamplingParams
    seed: int
    """Random seed of the request; every sample is a function of (seed, position)."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that `min_tokens` forbids: eos ids and stop_token_ids."""
    embeds: PromptEmbeds | None = None
    """Prompt embeddings, in place of token ids."""
    media: Media | None = None
    """Images, videos and audio of the prompt, without arrays; `StepPlan.encodes` refers to them by key."""
    pooling: PoolingParams | None = None
    """Pooling parameters, for a pooling model."""
    adapter: int = -1
    """Slot of the request's LoRA adapter; -1 without an adapter."""
    state: int = 0
    """Slot of the checkpoint (stored copy) of the SSM states after `num_computed` tokens; 0 without a
    checkpoint."""


class LoRAAssignment(msgspec.Struct):
    """A LoRA adapter to copy into a slot of the device, where it replaces the adapter that the slot has
    now."""

    slot: int
    adapter: LoRARequest


class StepPlan(msgspec.Struct):
    """The work of the worker in one step. The order is: copy KV blocks to lower tiers (host memory, disk),
    release rows, admit rows and copy their SSM states from checkpoints, append blocks, set values, compute,
    then copy SSM states to checkpoints.

    The previous step may still run. A token that the previous step samples is then an input of this step
    before its value is on the host. With several pipeline stages, a row is planned only after the value of
    its last token is known."""

    step: int
    released: list[int]
    admitted: list[Admission]
    block_rows: Ints
    """Row of each new block, grouped by row and in order of position."""
    block_ids: Ints
    """Id of each new block, [groups of layers, len(block_rows)]."""
    rows: Ints
    """Rows that compute in this step, in batch order."""
    num_tokens: Ints
    """Number of tokens that each of `rows` computes in this step."""
    samples: NDArray[np.bool_]
    """Whether each of `rows` computes its last token, so that it samples one or more new tokens."""
    num_drafts: Ints = _NONE
    """Number of draft tokens among the last tokens of each of `rows`; a draft token is accepted if the row
    samples the same token. Empty: no row has draft tokens."""
    drafts: Ints = _NONE
    """Draft tokens of all rows, concatenated. Empty: the worker has proposed the draft tokens itself."""
    values: Ints = _NO_VALUES
    """Rows and the values of their last tokens, [2, rows], for pipeline stages that did not sample these
    tokens."""

    constrained: Ints = _NONE
    """Rows whose next token is constrained by a grammar or a reasoning budget. Their masks depend on tokens
    that may not be sampled yet, so `Masks` are sent later. No row of the step samples before they arrive."""

    adapters: list[LoRAAssignment] = []
    """LoRA adapters to copy into slots before computing; each worker has read them from disk already."""

    evicted_media: list[bytes] = []
    """Keys of media items to remove from the encoder cache, before items are encoded."""
    encodes: list[MediaItem] = []
    """Media items to encode before computing. Their vectors (encoder outputs) stay in the encoder cache until
    they are in `evicted_media`."""

    stores: BlockStores | None = None
    """Blocks to copy to lower tiers of the KV cache before anything else; None for no blocks."""

    saves: Ints = _NO_VALUES
    """Checkpoints of SSM states to take after computing, [3, checkpoints]: the rows, the slots that their
    states are copied to, and the number of computed tokens of each row."""

    counts: tuple[int, ...] = ()
    """Tokens of this step on each engine of the data-parallel group; empty if this engine steps alone. A plan
    without rows is a dummy step, which the other engines need."""

    total_tokens: int = 0
    sampling_rows: Ints = _NONE
    """Rows that sample new tokens."""
    logit_rows: Ints = _NONE
    """Row of each sample: a sampling row has one sample, and one more for each of its draft tokens."""
    query_len: int = 0
    """Number of tokens per row if each row computes the same number and samples after each token; else 0."""

    def __post_init__(self) -> None:
        """Compute the derived fields, from `total_tokens` on."""
        all_sample = bool(self.samples.all())
        self.total_tokens = int(self.num_tokens.sum())
        self.sampling_rows = self.logit_rows = self.rows if all_sample else self.rows[self.samples]
        if len(self.num_drafts):
            self.logit_rows = np.repeat(self.sampling_rows, 1 + self.num_drafts[self.samples])
        if all_sample and len(self.logit_rows) == self.total_tokens and len(self.rows):
            per_row, rest = divmod(self.total_tokens, len(self.rows))
            self.query_len = per_row if not rest and (self.num_tokens == per_row).all() else 0

    def drafts_by_row(self) -> dict[int, list[int]]:
        """Return the draft tokens of `drafts` by row."""
        tokens = iter(self.drafts.tolist())
        counts = zip(self.rows.tolist(), self.num_drafts.tolist(), strict=True)
        return {row: list(islice(tokens, count)) for row, count in counts if count}

    @property
    def is_decode(self) -> bool:
        """Whether each row computes one token and samples one token."""
        return self.query_len == 1

    @staticmethod
    def idle(step: int) -> "StepPlan":
        """Return a plan without rows."""
        return StepPlan(step, [], [], _NONE, _NONE.reshape(1, 0), _NONE, _NONE, np.empty(0, np.bool_))


class RowLogprobs(msgspec.Struct):
    """Logprobs of one position: the sampled token first, then the most likely tokens in descending order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the sampled token in the vocabulary; 1 is the most likely token."""


class StepResult(msgspec.Struct):
    """Result of a plan, from the worker to the scheduler."""

    token_ids: Ints
    """New tokens of the sampling rows, in the plan's order; empty for a pooling model."""
    counts: Ints = _NONE
    """New tokens of each sampling row: the accepted draft tokens and one more. Empty: one per row."""
    logprobs: dict[int, list[RowLogprobs]] = {}
    """Logprobs of the new tokens, by row, for requests with logprobs."""
    prompt_logprobs: dict[int, list[RowLogprobs]] = {}
    """Logprobs of the prompt positions of this step's chunk, by row."""
    pooled: dict[int, Pooled] = {}
    """Output of a pooling model by sampling row."""
    drafted: Ints = _NONE
    """Number of draft tokens that each sampling row actually had; empty: all planned draft tokens."""
    aligned: dict[int, list[int]] = {}
    """Index of the encoder state at which each token begins, by row, for prompts aligned with audio."""
    sampling_masks: dict[int, list[list[int]]] = {}
    """By row and new token, the ids that were left to sample from after top_k, top_p and min_p; empty unless
    requests return them."""
    routes: StepRoutes | None = None
    """The MoE experts that all tokens of the step were routed to; None unless requests return experts."""
    device_s: float = 0.0
    """Seconds between the start of the step on the device, which is after the end of the previous one, and
    its end; 0: not measured."""


class Pending(Protocol):
    """A step that was launched and may still run."""

    def ready(self, timeout_s: float) -> bool:
        """Wait for the step for at most `timeout_s` seconds; return whether it is done."""

    def wait(self) -> StepResult:
        """Block until the step is done; raise its exception."""


DEAD_END = "grammar"
"""stop_reason of an error that the grammar of the request caused."""
TOO_COMPLEX = "grammar limit"
"""stop_reason of an error for a grammar that exceeds the limits of the grammar library."""


class FinishReason(msgspec.Struct):
    """Reason for which a sequence ended."""

    reason: str
    """stop | length | abort | error | repetition"""
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    keeps_last: bool = False
    """Whether the last token of a stopped sequence is part of its output. It is if the grammar was complete,
    and is not if the token is a stop token."""
    kv_transfer: dict[str, Any] | None = None
    """The `kv_transfer_params` for the client, if the sequence's prefix is kept for another engine."""


class FirstRun(msgspec.Struct):
    """Facts about a request that was scheduled for the first time. Times are monotonic seconds."""

    num_cached: int
    """Number of prompt tokens found in the prefix cache."""
    queued_at: float
    scheduled_at: float
    num_created: int = 0
    """Number of prompt tokens that the request computes and adds to the prefix cache."""
    miss: PrefixMiss | None = None
    """Reason for which no more of the prompt was cached; None if everything cacheable was."""
    num_from_host: int = 0
    """Cached prompt tokens that were loaded from host memory."""
    num_from_disk: int = 0
    """Cached prompt tokens that were loaded from disk."""
    num_from_remote: int = 0
    """Cached prompt tokens that were loaded from another engine."""


class StepOutput(msgspec.Struct, omit_defaults=True):
    """Output of a step by request, in columns: `token_ids[i]` is the new token of `request_ids[i]`."""

    request_ids: list[str]
    token_ids: list[int]
    counts: list[int] = []
    """Number of consecutive tokens of each request. Empty: one per request."""
    finished: dict[str, FinishReason] = {}
    logprobs: dict[str, list[RowLogprobs]] = {}
    """Logprobs of the new tokens, by request id."""
    drafted: dict[str, int] = {}
    """Number of draft tokens by request. All new tokens but the last are accepted draft tokens."""
    prompt_logprobs: dict[str, list[RowLogprobs]] = {}
    aligned: dict[str, list[int]] = {}
    sampling_masks: dict[str, list[list[int]]] = {}
    """By request and new token, the ids that were left to sample from after top_k, top_p and min_p."""
    routed: dict[str, RoutedRows] = {}
    """MoE experts of the tokens that each request has computed since its last output, by request id."""
    pooled: dict[str, Pooled] = {}
    """Outputs of a pooling model, by request id; these requests are also in `finished`."""
    admitted: dict[str, FirstRun] = {}
    """Facts about the requests that ran for the first time, by request id."""
    resumed: dict[str, float] = {}
    """Seconds for which each resumed request was preempted, by request id."""
    shares: dict[str, float] = {}
    """By id of each request with `Request.timed`: its share of the duration of the step in seconds, in
    proportion to its tokens."""
    at: float = 0.0
    """Monotonic time of the end of the step."""
    stats: StepStats = msgspec.field(default_factory=StepStats)

    def by_request(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the new tokens of each request."""
        if not self.counts:
            return zip(self.request_ids, ([token_id] for token_id in self.token_ids), strict=True)
        tokens = iter(self.token_ids)
        return zip(self.request_ids, (list(islice(tokens, count)) for count in self.counts), strict=True)


_BY_REQUEST = (
    "finished",
    "logprobs",
    "drafted",
    "prompt_logprobs",
    "aligned",
    "sampling_masks",
    "routed",
    "pooled",
    "admitted",
    "resumed",
    "shares",
)


def split_by_owner(step: StepOutput, owner_of: Mapping[str, Owner]) -> dict[Owner, StepOutput]:
    """Split a step output by the owner of each request; requests without an owner are left out. With one
    owner, the result is the step output itself. A request may have values without new tokens, such as
    logprobs of a chunk of its prompt."""
    by_name = {name: values for name in _BY_REQUEST if (values := getattr(step, name))}
    concerned = chain(step.request_ids, *by_name.values())
    owners = {owner_of[id] for id in concerned if id in owner_of}
    if len(owners) == 1:
        return {owners.pop(): step}
    parts = {owner: StepOutput([], [], stats=step.stats, at=step.at) for owner in owners}
    for id, new in step.by_request():
        if id not in owner_of:
            continue
        part = parts[owner_of[id]]
        part.request_ids.append(id)
        part.token_ids += new
        if step.counts:
            part.counts.append(len(new))
    for name, values in by_name.items():
        for id in owner_of.keys() & values:
            getattr(parts[owner_of[id]], name)[id] = values[id]
    return parts
