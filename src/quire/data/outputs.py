"""Outputs of requests: completions with their logprobs and times."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from numpy.typing import NDArray

from quire.data.prefix_miss import PrefixMiss
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Logprob:
    """One token's logprob at one position; rank 1 is the most likely token of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


@dataclass(slots=True)
class FlatLogprobs(Sequence[LogprobsOnePosition | None]):
    """Logprobs of many positions in flat lists, which are cheap for the garbage collector.

    The object is used like a list of dicts; a dict is built on access. An empty position is None, like the
    first position of prompt logprobs."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: Mapping[int, Logprob] | None) -> None:
        entries = position or {}
        self.append_fast(
            entries.keys(),
            (entry.logprob for entry in entries.values()),
            (entry.rank for entry in entries.values()),
            (entry.decoded_token for entry in entries.values()),
        )

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Append one position from parallel columns, without a dict in between."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))
        lengths = {len(self.token_ids), len(self.logprobs), len(self.ranks), len(self.decoded_tokens)}
        assert len(lengths) == 1, "the columns of a position differ in length"

    def extend(self, positions: Iterable[Mapping[int, Logprob] | None]) -> None:
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "LogprobsOnePosition | None | FlatLogprobs":
        if isinstance(index, slice):
            part = FlatLogprobs()
            part.extend(self[i] for i in range(*index.indices(len(self))))
            return part
        entries = range(self.start_indices[index], self.end_indices[index])
        if not entries:
            return None
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in entries
        }

    def __iter__(self) -> Iterator[LogprobsOnePosition | None]:
        return (self[i] for i in range(len(self)))


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs


@dataclass
class RequestStateStats:
    """Times (seconds) and counts of a request. `arrival_time` is wall time, `_ts` fields are monotonic."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False
    latency: float = 0.0
    """Seconds from arrival to the end of the request."""
    preempted_s: float = 0.0
    """Seconds for which sequences were preempted; like the following fields, the sum over all sequences."""
    num_preemptions: int = 0
    step_share_s: float = 0.0
    """The request's share of the duration of its steps, in seconds; 0 unless the share was requested."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Accepted draft tokens."""
    num_from_host: int = 0
    """Cached prompt tokens of the first sequence that were loaded from host memory."""
    num_from_disk: int = 0
    """Cached prompt tokens of the first sequence that were loaded from disk."""
    num_from_remote: int = 0
    """Cached prompt tokens of the first sequence that were loaded from another engine."""
    prefix_miss: PrefixMiss | None = None
    """Reason for which a part of the prompt was not in the prefix cache; None if everything cacheable was."""


@dataclass
class SamplingMask:
    """For each token of an output, the ids that were left to sample from after top_k, top_p and min_p."""

    token_ids: list[list[int]]


@dataclass
class CompletionOutput:
    """One of the n completions of a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    routed_experts: NDArray[Any] | None = field(default=None, repr=False)
    """With enable_return_routed_experts, once the completion has ended: the experts of each computed token in
    each MoE layer, [prompt + output - 1, MoE layers, experts per token]."""
    finish_reason: str | None = None
    """stop | length | abort | error | repetition; None while the completion runs"""
    stop_reason: int | str | None = None
    """Stop string or token id that ended the completion; None for the eos token."""
    lora_request: Any = field(default=None, repr=False)
    sampling_mask: SamplingMask | None = field(default=None, repr=False)
    spec_decode_metrics: dict[str, int] | None = field(default=None, repr=False)
    """num_drafts, num_draft_tokens and num_accepted_tokens of a finished sequence with draft tokens."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(init=False)
class RequestOutput:
    """Output of a request: its prompt, and its completions as they are now."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    aligned: list[int] | None = None
    """Index of the encoder state at which each token of a prompt aligned with audio begins."""
    error: Exception | None = None
    """Error of a failed request, which `LLM` raises; else None."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestStateStats | None = None,
        lora_request: Any = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        num_cache_creation_tokens: int | None = None,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        """Set the fields; ignore unknown keywords of later versions with a warning."""
        if unknown:
            warn_once(logger, f"RequestOutput: ignoring unknown arguments {', '.join(sorted(unknown))}")
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.num_cache_creation_tokens = num_cache_creation_tokens
        self.kv_transfer_params = kv_transfer_params
        self.ec_transfer_params = ec_transfer_params


def fast_instance(kind: type[T], **values: Any) -> T:
    """Build an instance with these attributes without calling `__init__`, which is too slow per token."""
    instance = object.__new__(kind)
    instance.__dict__ = values
    return instance


@dataclass
class BeamSearchSequence:
    """One beam: `tokens` are those of the prompt and its continuation; `logprobs` has an entry for each new
    token."""

    tokens: list[int]
    logprobs: list[LogprobsOnePosition]
    lora_request: Any = field(default=None, repr=False)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, in descending order of their scores."""

    sequences: list[BeamSearchSequence]
