"""Where processed items are kept for the next request with the same."""

import sys
from collections.abc import Mapping
from typing import Any, Literal

from quire.config.sections import MultimodalSection, ParallelSection
from quire.errors import ConfigError

CacheKind = Literal["off", "processor", "replicated", "shm"]
"""Nowhere; in each API process; keys in the API process, and values in the engine; keys in the API process,
and values in memory that all workers share."""


def cache_kind(
    section: MultimodalSection, parallel: ParallelSection, *, num_api: int, num_engines: int
) -> CacheKind:
    """For so many API processes, each of which speaks to so many engines."""
    if section.mm_processor_cache_gb <= 0:
        return "off"
    if num_api != 1 or num_engines != 1:
        return "processor"
    is_shared = section.mm_processor_cache_type == "shm" and _shares_memory(parallel)
    return "shm" if is_shared else "replicated"


def keeps_values(
    section: MultimodalSection, parallel: ParallelSection, *, num_api: int, num_engines: int
) -> bool:
    """Whether the engine keeps them for its API process."""
    return cache_kind(section, parallel, num_api=num_api, num_engines=num_engines) == "replicated"


def cache_alone(section: MultimodalSection, parallel: ParallelSection) -> CacheKind:
    """For an engine in the process that asks it."""
    kind = cache_kind(section, parallel, num_api=1, num_engines=1)
    return "processor" if kind == "replicated" else kind


def _shares_memory(parallel: ParallelSection) -> bool:
    """Whether an engine's processes can: all are on this machine, and it has memory without a name."""
    on_one_machine = parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray"
    return on_one_machine and sys.platform == "linux"


def max_object_bytes(section: MultimodalSection) -> int:
    """Of an item in shared memory."""
    return section.mm_shm_cache_max_object_size_mb << 20


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
