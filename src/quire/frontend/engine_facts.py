"""EngineFacts: static facts of an engine for API processes."""

from dataclasses import dataclass
from typing import Any

from quire.data.latency_target import NO_TARGET, LatencyTarget


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of an engine that an API process knows before the engine core is ready."""

    model_names: tuple[str, ...]
    """Served model names; the first one is reported."""
    root: str
    """Model argument of the user."""
    max_model_len: int
    vocab: int
    max_logprobs: int
    max_num_seqs: int
    """Maximum number of running sequences of all engine cores together."""
    block_size: int
    default_sampling: dict[str, Any]
    chat_template: str | None
    version: str
    start_time: float
    target: LatencyTarget = NO_TARGET
    """Latency targets of requests without their own."""
    slo_max_wait: float = 0.0
    """A request is refused if its first token is expected later than this multiple of its target; 0:
    never."""
