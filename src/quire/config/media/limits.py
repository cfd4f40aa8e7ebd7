"""How many items of each modality a prompt may have."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.facts import ArchFacts
from quire.errors import ConfigError, nearest

MODALITIES = ("image", "video", "audio")
DEFAULT_LIMIT = 999


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
    return replace(facts, media=None)
