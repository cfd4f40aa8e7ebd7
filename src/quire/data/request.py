"""Request: one sequence, as it is sent to the engine core and stored by the scheduler."""

import msgspec

from quire.data.cache_hints import CacheHints
from quire.data.kv_transfer import RemotePrefix, remote_prefix, transfer_params
from quire.data.latency_target import NO_TARGET, LatencyTarget
from quire.data.lora import LoRARequest
from quire.data.multimodal import Media
from quire.data.params import SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.prompt_embeds import PromptEmbeds
from quire.data.repetition import RepetitionCounts


class Request(msgspec.Struct, omit_defaults=True, kw_only=True, eq=False):
    """One sequence with its scheduling state."""

    id: str
    tokens: list[int]
    """Prompt, then output. Sequences of one prompt share the list until they have output. The list is
    replaced, never modified."""
    params: SamplingParams
    prompt_len: int
    limit: int
    """Number of tokens at which the sequence ends: prompt and max_tokens, but at most max_model_len."""
    seed: int
    eos_id: int = -1
    """Token id of eos; -1 with ignore_eos. If the sequence ends with it, no stop_reason is reported."""
    priority: int = 0
    arrived_at: float = 0.0
    """Wall-clock time in seconds of the arrival in the API server process."""
    cache_salt: str | None = None
    hints: CacheHints | None = None
    """Hints about the later use of the sequence's KV blocks."""
    timed: bool = False
    """Whether the sequence's share of the duration of each step is reported."""
    embeds: PromptEmbeds | None = None
    """Prompt embeddings; the prompt tokens are then zeros."""
    media: Media | None = None
    """Images, videos and audio of the prompt, with placeholders among the tokens."""
    lora: LoRARequest | None = None
    """LoRA adapter of the request."""
    top_id: int = 0
    """Largest token id of the request if only the LoRA adapter may have this token; 0 if the model has it."""
    tenant: int = 0
    """Number of the request's tenant if tokens are shared fairly by API key; 0 for no tenant."""
    weight: float = 1.0
    """Weight of the tenant when tokens are divided between API keys."""
    target: LatencyTarget = NO_TARGET
    """Latency targets of the request."""
    pooling: PoolingParams | None = None
    """Parameters for a pooling model: the sequence ends with its prompt and has a pooled output."""

    remote: RemotePrefix | None = None
    """Prefix to load from another engine; None without one, or after the attempt."""
    offers: bool = False
    """Whether the sequence's prefix is kept for another engine when the sequence ends."""

    # The scheduler sets the fields below. Only for a request that is resumed after the death of its core, the
    # API server process sets `has_run`, `num_cached`, `num_prompt_logprobs` and `num_routed`.
    row: int = -1
    num_preemptions: int = 0
    preempted_at: float = 0.0
    """Monotonic time of the preemption; 0 unless the request waits to be resumed."""
    has_run: bool = False
    """Whether the request was scheduled before; its first run was reported to the API server process."""
    num_cached: int = 0
    """Number of prompt tokens found in the prefix cache when the request first ran."""
    num_from_host: int = 0
    """Number of cached prompt tokens that were loaded from host memory."""
    num_from_disk: int = 0
    """Number of cached prompt tokens that were loaded from disk."""
    num_from_remote: int = 0
    """Number of cached prompt tokens that were loaded from another engine."""
    num_prompt_logprobs: int = 0
    """Number of prompt positions with delivered logprobs."""
    num_routed: int = 0
    """Number of tokens whose MoE experts were already delivered, counted from the start of the prompt."""
    adapter_digest: bytes = b""
    """Digest of the LoRA adapter, once the adapter is loaded."""
    block_keys: list[bytes] = []
    """Prefix-cache keys of the full blocks hashed so far."""
    queued_at: float = 0.0
    """Monotonic time at which the request was queued."""
    stop_ids: frozenset[int] = frozenset()
    """`params.stop_token_ids` as a set, for a fast lookup per token."""
    repetition: RepetitionCounts | None = None
    """State of `params.repetition_detection`."""

    def prepare_stops(self) -> None:
        """Set `stop_ids` and `repetition` from the params, once."""
        if self.params.stop_token_ids and not self.stop_ids:
            self.stop_ids = frozenset(self.params.stop_token_ids)
        detection = self.params.repetition_detection
        if detection is not None and detection.max_pattern_size and self.repetition is None:
            self.repetition = RepetitionCounts(detection)

    @property
    def num_loaded(self) -> int:
        """Return the number of prompt tokens that were loaded from lower tiers of the KV cache, or from
        another engine."""
        return self.num_from_host + self.num_from_disk + self.num_from_remote

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def held_ids(self) -> tuple[int, ...]:
        """Return the token ids that end the sequence, which must not be sampled before min_tokens."""
        ids = list(self.params.stop_token_ids or ())
        return tuple(ids if self.eos_id < 0 else [self.eos_id, *ids])


def with_transfer(requests: list[Request]) -> list[Request]:
    """Apply the `kv_transfer_params` of a call to its sequences, and return them: every sequence loads the
    prefix from another engine, or the first sequence keeps its prefix for another engine."""
    if (transfer := transfer_params(requests[0].params.extra_args)) is not None:
        for request in requests:
            request.remote = remote_prefix(transfer)
        requests[0].offers = transfer.do_remote_decode
    return requests
