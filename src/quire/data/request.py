"""Request: one sequence to continue, as it travels to the core and as the scheduler keeps it."""

import msgspec

from quire.data.lora import LoRARequest
from quire.data.multimodal import Media
from quire.data.params import SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.prompt_embeds import PromptEmbeds
from quire.data.repetition import RepetitionCounts


class Request(msgspec.Struct, omit_defaults=True, kw_only=True, eq=False):
    """One sequence, and where the scheduler stands with it."""

    id: str
    tokens: list[int]
    """Prompt, then output. Sequences of one prompt share the list until they have output of their own: it is
    replaced, never changed."""
    params: SamplingParams
    prompt_len: int
    limit: int
    """The sequence ends when it has this many tokens (max_tokens and max_model_len, whichever is first)."""
    seed: int
    eos_id: int = -1
    """The id that ends the sequence without being named as stop_reason; -1 with ignore_eos."""
    priority: int = 0
    arrived_at: float = 0.0
    """Wall clock, at the front."""
    cache_salt: str | None = None
    timed: bool = False
    """Whether its share of every step is told."""
    embeds: PromptEmbeds | None = None
    """The prompt as vectors; its tokens are zeros then, and stand for nothing."""
    media: Media | None = None
    """Images, videos and sounds of the prompt; its tokens have their spans."""
    lora: LoRARequest | None = None
    """The adapter that it is answered with."""
    top_id: int = 0
    """The largest token id that it names, if the model does not have it: its adapter must."""
    tenant: int = 0
    """Whose it is, where tokens are shared by key; 0: nobody's in particular."""
    weight: float = 1.0
    """What that tenant's share is measured by."""
    pooling: PoolingParams | None = None
    """For a pooling model: the sequence ends with its prompt, and a vector comes of it in place of tokens."""

    # What follows belongs to the scheduler. A request that a dead core began brings `has_run`, `num_cached`,
    # `num_prompt_logprobs` and, in `tokens`, its output so far.
    row: int = -1
    num_preemptions: int = 0
    preempted_at: float = 0.0
    """Monotonic; 0 unless it waits to come back."""
    has_run: bool = False
    """Whether it had a row before, and its front knows."""
    num_cached: int = 0
    """Prompt tokens that the prefix cache held when it first ran."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose logprobs have been delivered."""
    adapter_digest: bytes = b""
    """Of its adapter's contents, once that was read."""
    block_keys: list[bytes] = []
    """Prefix-cache keys of the full blocks hashed so far."""
    queued_at: float = 0.0
    """Monotonic."""
    stop_ids: frozenset[int] = frozenset()
    """`params.stop_token_ids`, for a lookup per token."""
    repetition: RepetitionCounts | None = None
    """What `params.repetition_detection` has counted."""

    def prepare_stops(self) -> None:
        """Set the two fields above from the params, once."""
        if self.params.stop_token_ids and not self.stop_ids:
            self.stop_ids = frozenset(self.params.stop_token_ids)
        detection = self.params.repetition_detection
        if detection is not None and detection.max_pattern_size and self.repetition is None:
            self.repetition = RepetitionCounts(detection)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def held_ids(self) -> tuple[int, ...]:
        """The ids that must not be sampled before min_tokens: whatever could end the sequence."""
        ids = list(self.params.stop_token_ids or ())
        return tuple(ids if self.eos_id < 0 else [self.eos_id, *ids])
