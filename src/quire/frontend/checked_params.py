"""Sampling parameters that are checked once for all prompts of a call; check of cache salts."""

from dataclasses import dataclass
from typing import Any

from quire.data.params import MAX_SALT_CHARS, SamplingParams
from quire.errors import RequestError


@dataclass(frozen=True, slots=True)
class CheckedParams:
    """Sampling parameters that were checked and completed for the model or a LoRA adapter. All prompts of a
    call share them; they are not modified any more."""

    params: SamplingParams
    eos_id: int
    """eos token id; -1 with ignore_eos."""
    top_id: int
    """Largest token id in the parameters; 0 without a LoRA adapter."""


def check_salt(salt: Any) -> None:
    """Refuse a `cache_salt` that is not a string, empty or too long."""
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"cache_salt must be a non-empty string, got {salt!r:.80}", param="cache_salt")
    if salt is not None and len(salt) > MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt may have at most {MAX_SALT_CHARS} characters, got {len(salt)}; send its hash",
            param="cache_salt",
        )
