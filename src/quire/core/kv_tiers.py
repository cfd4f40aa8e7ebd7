"""Opens the KV cache tiers in host memory and on disk, and the exchange of prefixes with other engines."""

import contextlib
import shutil
from concurrent.futures import Future
from math import ceil, floor
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.config.kv_offloading import default_host_bytes, existing_part
from quire.config.kv_transfer import TransferSettings
from quire.config.machine import GIB
from quire.core.kv_transfer import Producer
from quire.data.kv_events import DISK, HOST
from quire.data.kv_tiers import BlockLoad, BlockStores, LoadDone
from quire.errors import ConfigError
from quire.executor import Executor
from quire.executor.worker_process import world_size
from quire.logs import get_logger
from quire.memory import human
from quire.sched.kv_manager import KVManager
from quire.sched.kv_tiers import KVTiers
from quire.sched.tier_index import EntryTiers, TierIndex
from quire.system.platform import free_memory

log = get_logger(__name__)


class ExecutorCopies:
    """Copies KV cache entries between the device and the lower tiers by calling the workers of an
    executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        return self._executor.load(load)

    def store(self, stores: BlockStores) -> None:
        self._executor.call("store_blocks", [stores])


def open_tiers(config: EngineConfig, executor: Executor, kv: KVManager) -> KVTiers:
    """Open the lower tiers of the KV cache on all workers, and return them as the KV manager uses them. An
    entry is in a tier only if every worker has its part."""
    cache = config.cache
    page_bytes, state_bytes = map(sum, zip(*executor.call("describe_tiers"), strict=True))
    pages = EntryTiers(kv.pool, page_bytes) if kv.has_pages else None
    states = None if kv.states is None else EntryTiers(kv.states.pool, state_bytes)
    kinds = [kind for kind in (pages, states) if kind is not None]
    gib, free = cache.kv_offloading_size, free_memory()
    num_engines = config.parallel.data_parallel_size_local or config.parallel.data_parallel_size
    if gib is None:
        gib = _default_gib(config, kinds, free, num_engines)
    if gib:
        counts = _num_entries("kv_offloading_size", gib, kinds, free, "host memory", num_engines)
        for kind, count in zip(kinds, counts, strict=True):
            kind.host = TierIndex(count)
    if cache.kv_offloading_dir is not None:
        gib, place = cache.kv_offloading_dir_size, cache.kv_offloading_dir
        free = _free_on_disk(Path(place))
        counts = _num_entries("kv_offloading_dir_size", gib, kinds, free, place, num_engines)
        for kind, count in zip(kinds, counts, strict=True):
            kind.disk = TierIndex(count)
    hosts = [None if kind is None else kind.host for kind in (pages, states)]
    disks = [None if kind is None else kind.disk for kind in (pages, states)]
    capacities = [[0 if tier is None else tier.capacity for tier in tiers] for tiers in (hosts, disks)]
    by_rank = executor.call("open_tiers", capacities)
    settings = TransferSettings.of(cache.kv_transfer_config)
    offers = None
    if settings is not None and settings.produces:
        offers = Producer(config, settings, kv, executor).offers
    tiers = KVTiers(
        kv,
        ExecutorCopies(executor),
        pages=pages,
        states=states,
        salted_to_disk=cache.kv_offloading_salted,
        offers=offers,
        takes_remote=settings is not None and settings.consumes,
        remote_fails=settings is not None and settings.fails,
    )
    if kv.events is not None:
        for tier, medium in [(kind.host, HOST) for kind in kinds] + [(kind.disk, DISK) for kind in kinds]:
            if tier is not None:
                kv.events.watch(tier, medium)
    common = set(by_rank[0]).intersection(*by_rank[1:])
    tiers.stores.add_files([key for key in by_rank[0] if key in common])
    _log_sizes("host memory", [(kind, kind.host) for kind in kinds], kv)
    _log_sizes(cache.kv_offloading_dir, [(kind, kind.disk) for kind in kinds], kv)
    return tiers


def _default_gib(config: EngineConfig, kinds: list[EntryTiers], free: int, num_engines: int) -> float:
    """Return the default size of the host tier in GiB; 0 if one entry of each kind would not fit. `free` is
    the free host memory in bytes, which `num_engines` engines share."""
    num_bytes = default_host_bytes(
        free,
        sum(kind.pool.num_usable * kind.entry_bytes for kind in kinds),
        num_devices=world_size(config.parallel),
        num_engines=num_engines,
    )
    return num_bytes / GIB if num_bytes >= sum(kind.entry_bytes for kind in kinds) else 0.0


def _log_sizes(place: str | None, kinds: list[tuple[EntryTiers, TierIndex | None]], kv: KVManager) -> None:
    """Log the capacity of the tier in `place` (host memory or a directory), and how much of it is filled."""
    texts, num_bytes = list[str](), 0
    for kind, tier in kinds:
        if tier is None:
            return
        name, scale = "checkpoints of states", 1.0
        if kind.pool is kv.pool:
            name, scale = "tokens", kv.block_size / len(kv.windows)
        num_bytes += tier.capacity * kind.entry_bytes
        texts.append(f"{int(tier.capacity * scale):,} {name} fit, {int(len(tier) * scale):,} are there")
    log.info("KV cache tier in %s: %s, %s", place, human(num_bytes), "; ".join(texts))


def _num_entries(
    name: str, gib: float, kinds: list[EntryTiers], free: int, place: str, num_engines: int
) -> list[int]:
    """Return the number of entries of each kind in a tier of `gib` GiB, in the same proportions as on the
    device. Raise if one entry of each kind does not fit, or if fewer than `gib` GiB are free for each of
    `num_engines` engines."""
    num_bytes, least = int(gib * GIB), sum(kind.entry_bytes for kind in kinds)
    if num_bytes < least:
        what = "one block" if len(kinds) == 1 else "one block and one checkpoint of states,"
        raise ConfigError(
            f"{name}={gib:g} GiB is less than {what} of {human(least)}: raise it to at least"
            f" {ceil(least / GIB * 1e4) / 1e4:.4f}"
        )
    if num_bytes * num_engines > free:
        needed = human(num_bytes) if num_engines == 1 else f"{num_engines} engines * {human(num_bytes)}"
        raise ConfigError(
            f"{name}={gib:g} GiB ({needed}) is more than the {human(free)} that are free in {place}: lower it"
            f" to at most {floor(free / num_engines / GIB * 100) / 100:.2f}"
        )
    on_device = [kind.pool.num_usable * kind.entry_bytes for kind in kinds]
    return [
        1 + int((num_bytes - least) * size / sum(on_device)) // kind.entry_bytes
        for kind, size in zip(kinds, on_device, strict=True)
    ]


def _free_on_disk(folder: Path) -> int:
    """Return the bytes that a tier in this directory may use: the disk's free bytes and those of its
    files."""
    folder = folder.expanduser()
    free = shutil.disk_usage(existing_part(folder)).free
    for path in folder.glob("*/*/*.kv"):
        with contextlib.suppress(OSError):  # another engine may delete it
            free += path.lstat().st_size
    return free
