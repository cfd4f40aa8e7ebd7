"""How many items of each modality a prompt may have."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.errors import ConfigError, nearest

MODALITIES = ("image", "video", "audio")
DEFAULT_LIMIT = 999
_NOT_CROSSED: dict[str, Any] = {
    "pipeline_parallel_size": 1,
    "speculative_config": None,
    "enable_lora": False,
    "enable_prompt_embeds": False,
}
"""What is not built for decoders that see the states of an encoder, and the value that does without."""


def limits_of(given: Mapping[str, Any] | None, *, language_model_only: bool) -> dict[str, int]:
    """By modality, out of limit_mm_per_prompt."""
    given = given or {}
    for name in given:
        if name not in MODALITIES:
            known = ", ".join(MODALITIES)
            close = nearest(name, MODALITIES)
            raise ConfigError(f"limit_mm_per_prompt has no modality {name!r}; known: {known}{close}")
    if language_model_only:
        return dict.fromkeys(MODALITIES, 0)
    return {name: _limit(name, given.get(name, DEFAULT_LIMIT)) for name in MODALITIES}


def _limit(name: str, given: object) -> int:
    count = given.get("count", DEFAULT_LIMIT) if isinstance(given, dict) else given
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(
            f"limit_mm_per_prompt.{name} must be a number from 0 on, or an object with `count`, not {given!r}"
        )
    return count


def without_unused(facts: ArchFacts, limits: Mapping[str, int]) -> ArchFacts:
    """The model without a tower, if no prompt may have anything for it."""
    if facts.media is None or any(limits[name] for name in facts.media.modalities):
        return facts
    if facts.media.crossed:
        raise ConfigError(
            f"{facts.architecture} does nothing but hear: leave language_model_only and a "
            "limit_mm_per_prompt of 0 out"
        )
    return replace(facts, media=None)


def check_crossed(facts: ArchFacts, settings: Mapping[str, Any]) -> None:
    """Refuse what a decoder that sees the states of an encoder cannot have yet, by name."""
    if facts.media is None or not facts.media.crossed:
        return
    for name, without in _NOT_CROSSED.items():
        if (settings.get(name) or without) != without:
            raise ConfigError(
                f"{name} cannot be had with {facts.architecture}, whose decoder sees the states of an "
                "encoder: leave it out"
            )
