"""EngineFacts: what an API process knows of its engine."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an API process knows of its engine before the core is up."""

    model_names: tuple[str, ...]
    """The first is the one that is reported."""
    root: str
    """The model as the user named it."""
    max_model_len: int
    vocab: int
    max_logprobs: int
    max_num_seqs: int
    """Of all cores."""
    block_size: int
    default_sampling: dict[str, Any]
    chat_template: str | None
    version: str
    start_time: float
