"""Location and size of the cache of processed multimodal items."""

import sys
from collections.abc import Mapping
from typing import Any, Literal

from quire.config.sections import MultimodalSection, ParallelSection
from quire.errors import ConfigError

CacheKind = Literal["off", "processor", "shared", "replicated", "shm"]
"""Location of the cache of processed items. off: no cache; processor: in each API server process; shared: in
memory that all API server processes share; replicated: hashes of items in the API server process and the
items in the engine; shm: hashes in the API server process and items in memory that all workers share."""


def cache_kind(
    section: MultimodalSection, parallel: ParallelSection, *, num_api: int, num_engines: int
) -> CacheKind:
    """Return the location of the cache for `num_api` API server processes, each connected to `num_engines`
    engines."""
    if section.mm_processor_cache_gb <= 0:
        return "off"
    if num_api > 1 and sys.platform == "linux":
        return "shared"
    if num_api != 1 or num_engines != 1:
        return "processor"
    is_shared = section.mm_processor_cache_type == "shm" and _shares_memory(parallel)
    return "shm" if is_shared else "replicated"


def engine_holds_values(
    section: MultimodalSection, parallel: ParallelSection, *, num_api: int, num_engines: int
) -> bool:
    """Return whether the engine core caches the processed items, and its API server process only their
    hashes."""
    return cache_kind(section, parallel, num_api=num_api, num_engines=num_engines) == "replicated"


def in_process_cache_kind(section: MultimodalSection, parallel: ParallelSection) -> CacheKind:
    """Return the location of the cache for an engine in the process of its caller (offline use)."""
    kind = cache_kind(section, parallel, num_api=1, num_engines=1)
    return "processor" if kind == "replicated" else kind


def _shares_memory(parallel: ParallelSection) -> bool:
    """Return whether all processes of an engine are on one Linux machine, so that they can share memory."""
    on_one_machine = parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray"
    return on_one_machine and sys.platform == "linux"


def max_object_bytes(section: MultimodalSection) -> int:
    """Return the maximum size in bytes of a processed item that is cached in shared memory; larger items are
    not cached."""
    return section.mm_shm_cache_max_object_size_mb << 20


def max_bytes(section: MultimodalSection) -> int:
    return int(section.mm_processor_cache_gb * 2**30)


def check_cache(args: Mapping[str, Any]) -> None:
    """Raise if the user's settings of the multimodal cache contradict each other."""
    size, kind = args.get("mm_shm_cache_max_object_size_mb"), args.get("mm_processor_cache_type", "lru")
    if size is not None and kind != "shm":
        raise ConfigError(
            f"mm_shm_cache_max_object_size_mb={size} is for mm_processor_cache_type=shm, and that is {kind}: "
            "leave one out, or give the other"
        )
