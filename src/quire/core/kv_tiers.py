"""Opens the lower tiers of the KV cache on the workers."""

import shutil
from concurrent.futures import Future
from pathlib import Path

import psutil

from quire.config.engine import EngineConfig
from quire.data.kv_events import DISK, HOST
from quire.data.kv_tiers import BlockLoad, BlockStores, LoadDone
from quire.errors import ConfigError
from quire.executor import Executor
from quire.logs import get_logger
from quire.memory import human
from quire.sched.kv_manager import KVManager
from quire.sched.kv_tiers import KVTiers
from quire.sched.tier_index import TierIndex

log = get_logger(__name__)

GIB = 1 << 30


class ExecutorCopies:
    """Copies of blocks by the workers of an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        return self._executor.load(load)

    def store(self, stores: BlockStores) -> None:
        self._executor.call("store_blocks", [stores])


def open_tiers(config: EngineConfig, executor: Executor, kv: KVManager) -> KVTiers:
    """Open the tiers on all workers. A block is in a tier if it is there on each of them."""
    cache = config.cache
    block_bytes = sum(executor.call("describe_tiers"))
    num_slots = num_files = 0
    if cache.kv_offloading_size:
        free = psutil.virtual_memory().available
        num_slots = _num_blocks(
            "kv_offloading_size", cache.kv_offloading_size, block_bytes, free, "host memory"
        )
    if cache.kv_offloading_dir is not None:
        size = cache.kv_offloading_dir_size
        free = _free_on_disk(Path(cache.kv_offloading_dir).expanduser())
        num_files = _num_blocks("kv_offloading_dir_size", size, block_bytes, free, cache.kv_offloading_dir)
    by_rank = executor.call("open_tiers", [num_slots])
    host, disk = TierIndex(num_slots) if num_slots else None, TierIndex(num_files) if num_files else None
    tiers = KVTiers(
        kv,
        ExecutorCopies(executor),
        host=host,
        disk=disk,
        block_bytes=block_bytes,
        salted_to_disk=cache.kv_offloading_salted,
    )
    if kv.events is not None:
        for tier, medium in ((host, HOST), (disk, DISK)):
            if tier is not None:
                kv.events.watch(tier, medium)
    common = set(by_rank[0]).intersection(*by_rank[1:])
    tiers.find_files([key for key in by_rank[0] if key in common])
    for tier, place in ((host, "host memory"), (disk, cache.kv_offloading_dir)):
        if tier is not None:
            num_tokens = tier.capacity * cache.block_size // len(kv.windows)
            size = tier.capacity * block_bytes
            log.info(
                "KV cache tier in %s: %s, %s tokens fit, %s are there",
                place,
                human(int(size)),
                f"{num_tokens:,}",
                f"{len(tier) * cache.block_size // len(kv.windows):,}",
            )
    return tiers


def _num_blocks(name: str, gib: float, block_bytes: int, free: int, place: str) -> int:
    """Return the number of blocks in a tier of `gib` GiB; raise if it has none, or does not fit."""
    num_bytes = int(gib * GIB)
    if num_bytes < block_bytes:
        raise ConfigError(
            f"{name}={gib:g} GiB is less than one block of {human(block_bytes)}: raise it to at least"
            f" {block_bytes / GIB:.4f}"
        )
    if num_bytes > free:
        raise ConfigError(
            f"{name}={gib:g} GiB ({human(num_bytes)}) is more than the {human(free)} that are free in"
            f" {place}: lower it to at most {free / GIB:.2f}"
        )
    return num_bytes // block_bytes


def _free_on_disk(folder: Path) -> int:
    """Return the free bytes of a disk and those of the tier's files on it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    files = (path for path in folder.glob("*/*/*.kv"))
    return shutil.disk_usage(existing).free + sum(path.stat().st_size for path in files)
