"""Limits on the number of items of each modality in a prompt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.errors import ConfigError, nearest

MODALITIES = ("image", "video", "audio")
DEFAULT_LIMIT = 999
_WITHOUT_CROSS_ATTENTION: dict[str, Any] = {
    "pipeline_parallel_size": 1,
    "speculative_config": None,
    "enable_lora": False,
    "enable_prompt_embeds": False,
}
"""Settings that are not supported for decoders with cross-attention, and the value that disables each."""


def limits_of(limits: Mapping[str, Any] | None, *, language_model_only: bool) -> dict[str, int]:
    """Validate limit_mm_per_prompt, and return the most items of each modality in a prompt."""
    limits = limits or {}
    for name in limits:
        if name not in MODALITIES:
            known = ", ".join(MODALITIES)
            close = nearest(name, MODALITIES)
            raise ConfigError(f"limit_mm_per_prompt has no modality {name!r}; known: {known}{close}")
    if language_model_only:
        return dict.fromkeys(MODALITIES, 0)
    return {name: _check_limit(name, limits.get(name, DEFAULT_LIMIT)) for name in MODALITIES}


def _check_limit(name: str, value: object) -> int:
    count = value.get("count", DEFAULT_LIMIT) if isinstance(value, dict) else value
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(
            f"limit_mm_per_prompt.{name} must be a number from 0, or an object with `count`, not {value!r}"
        )
    return count


def drop_unused_encoder(facts: ArchFacts, limits: Mapping[str, int]) -> ArchFacts:
    """Return the model without its media encoder if the limits of all its modalities are 0."""
    if facts.media is None or any(limits[name] for name in facts.media.modalities):
        return facts
    if facts.media.num_cross_states:
        raise ConfigError(
            f"{facts.architecture} needs audio in every prompt: leave out language_model_only and a "
            "limit_mm_per_prompt of 0"
        )
    return replace(facts, media=None)


def check_cross_attention(facts: ArchFacts, settings: Mapping[str, Any]) -> None:
    """Raise if a setting is not supported for a decoder with cross-attention."""
    if facts.media is None or not facts.media.num_cross_states:
        return
    for name, disabled in _WITHOUT_CROSS_ATTENTION.items():
        if (settings.get(name) or disabled) != disabled:
            raise ConfigError(
                f"{name} is not supported for {facts.architecture}, which has a decoder with "
                "cross-attention: leave it out"
            )
