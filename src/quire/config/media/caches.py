"""Where processed items are kept for the next request with the same."""

from collections.abc import Mapping
from typing import Any, Literal

from quire.config.sections import MultimodalSection
from quire.errors import ConfigError

CacheKind = Literal["off", "processor", "replicated", "shm"]
"""Nowhere; in each API process; keys in the API process, and values in the engine; keys in the API process,
and values in memory that all workers share."""

FAR: tuple[CacheKind, ...] = ("replicated", "shm")
"""Those whose values are not in the API process. Shared memory is not built: the engine has them."""


def cache_kind(section: MultimodalSection, *, num_api: int, num_engines: int) -> CacheKind:
    """For so many API processes, each of which speaks to so many engines."""
    if section.mm_processor_cache_gb <= 0:
        return "off"
    if num_api != 1 or num_engines != 1:
        return "processor"
    return "shm" if section.mm_processor_cache_type == "shm" else "replicated"


def keeps_values(section: MultimodalSection, *, num_api: int, num_engines: int) -> bool:
    """Whether the engine keeps them for its API process."""
    return cache_kind(section, num_api=num_api, num_engines=num_engines) in FAR


def max_bytes(section: MultimodalSection) -> int:
    return int(section.mm_processor_cache_gb * 2**30)


def check_cache(given: Mapping[str, Any]) -> None:
    """As the user gave them."""
    size, kind = given.get("mm_shm_cache_max_object_size_mb"), given.get("mm_processor_cache_type", "lru")
    if size is not None and kind != "shm":
        raise ConfigError(
            f"mm_shm_cache_max_object_size_mb={size} is for mm_processor_cache_type=shm, and that is {kind}: "
            "leave one out, or give the other"
        )
