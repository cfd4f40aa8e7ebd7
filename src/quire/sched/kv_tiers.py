"""KVTiers: blocks of the KV cache in host memory and on disk.

Full blocks are copied to host memory when they are evicted from the device, or shortly before, and to disk
when they are full. The copy is part of a step, before it computes: steps run in order, so the block is
complete and not yet overwritten. If the prefix of a request continues in a lower tier, the request waits
while its blocks are copied to the device, beside the steps of others. It holds these blocks until it is
admitted."""

import time
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.data.kv_tiers import BlockLoad, BlockStores, LoadDone
from quire.data.request import Request
from quire.data.stats import TierStats
from quire.logs import get_logger
from quire.sched.blocks import Block
from quire.sched.kv_manager import Hit, KVManager, is_salted
from quire.sched.running import Running
from quire.sched.tier_index import TierIndex

log = get_logger(__name__)

BELOW = Block(-1)
"""Stands in a `Hit` for a block that only a lower tier holds."""
AHEAD_SHARE = 1 / 4
"""Share of the blocks, the next ones to be evicted, that are copied to host memory before."""
NUM_AHEAD = 64
"""Most blocks that a step copies ahead, beside as many as it fills."""
MAX_LOADS = 8
"""Most requests with blocks on their way to the device at the same time."""
DRAIN_S = 60.0
"""Seconds to wait for the copies under way when the cache is reset."""


_READY: Future[Any] = Future()
_READY.set_result(None)


class TierCopies(Protocol):
    """The workers, which copy blocks."""

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        """Copy blocks to the device while steps run."""

    def store(self, stores: BlockStores) -> None:
        """Copy blocks to lower tiers now, after the submitted steps."""


@dataclass(slots=True)
class _Load:
    """Blocks of a request on their way to the device."""

    request: Request
    shared: list[Block]
    """Blocks of its prefix that are on the device."""
    blocks: list[Block]
    """Blocks that are being filled; they are neither indexed nor free."""
    keys: list[bytes]
    places: list[int]
    """Place of each block in the prefix; blocks of several groups have the same."""
    after: int
    """The copy starts when this step is done: until then, steps may use the blocks."""
    slots: list[int] = field(default_factory=list)
    coming: Future[LoadDone] | None = None
    """None: the copy has not started."""


@dataclass(slots=True)
class _InFlight:
    """A planned step: the blocks that it fills and those that it stores."""

    filled: list[tuple[bytes, Block]]
    stores: BlockStores | None
    to_host: list[bytes]
    to_disk: list[bytes]


class KVTiers:
    """The lower tiers of the KV cache. It is the admission check of requests that wait for their blocks."""

    def __init__(
        self,
        kv: KVManager,
        copies: TierCopies,
        *,
        host: TierIndex | None = None,
        disk: TierIndex | None = None,
        block_bytes: int = 0,
        salted_to_disk: bool = False,
    ) -> None:
        """Build the tiers of a cache. `block_bytes` is the size of a block on all workers."""
        assert kv.states is None and kv.has_pages, "checkpoints of states have no lower tier"
        self.kv, self.host, self.disk = kv, host, disk
        self.block_bytes = block_bytes
        self.salted_to_disk = salted_to_disk
        self.disk_is_off = False
        """Whether a worker cannot write to its disk any more."""
        self.opened = False
        self.running: Running | None = None
        self.stats = TierStats()
        self._copies = copies
        self._planned = 0
        """The last planned step."""
        self._steps: dict[int, _InFlight] = {}
        """Planned steps without a result."""
        self._unwritten: set[bytes] = set()
        """Keys of blocks that steps in flight fill."""
        self._evicted: dict[bytes, int] = {}
        """Evicted blocks that the next step stores, by key."""
        self._ahead: deque[Block] = deque()
        """Free blocks to copy to host memory before they are evicted."""
        self._next_search = 0
        """Number of allocated blocks at which `_ahead` is searched again."""
        self._full: dict[bytes, Block] = {}
        """Blocks that the next step writes to disk, by key."""
        self._dropped: list[bytes] = []
        """Keys of files to delete."""
        self._loads: dict[str, _Load] = {}
        """Copies to the device, by request id."""
        self._stray: list[_Load] = []
        """Copies to the device for requests that have ended."""
        self._held: dict[str, list[Block]] = {}
        """Blocks of loaded requests that wait for a row, by request id."""
        self._tried: set[str] = set()
        """Waiting requests that have loaded their blocks once."""
        kv.tiers = self

    def find_files(self, keys: Iterable[bytes]) -> None:
        """Index the files of an earlier run, the least recently used first; those beyond the capacity are
        deleted."""
        if self.disk is None:
            return
        for key in keys:
            if (allotted := self.disk.allot(key)) is not None:
                self.disk.commit(key)
                self._dropped += [] if allotted[1] is None else [allotted[1]]

    # ---- storing

    def note_evicted(self, blocks: list[Block]) -> None:
        for block in blocks:
            assert block.key is not None
            if block.key not in self._unwritten and block.id >= 0:
                self._evicted[block.key] = block.id

    def plan(self, step: int, fresh: Iterable[Block]) -> BlockStores | None:
        """Return what the planned step stores before it computes; it fills `fresh` blocks."""
        self._planned = step
        filled = [(block.key, block) for block in fresh if block.key is not None]
        self._unwritten.update(key for key, _ in filled)
        stores, to_host, to_disk = self._take_stores(NUM_AHEAD + len(filled))
        self._steps[step] = _InFlight(filled, stores, to_host, to_disk)
        return stores

    def _take_stores(self, num_ahead: int = 0) -> tuple[BlockStores | None, list[bytes], list[bytes]]:
        """Return the blocks to store, and the keys of those that go to host memory and to disk."""
        evicted, self._evicted = self._evicted, {}
        full, self._full = self._full, {}
        ahead = self._take_ahead(num_ahead)
        kept = {key: block.id for key, block in full.items() if block.key == key} | ahead
        ids = evicted | {key: id for key, id in kept.items() if key not in evicted}
        stores, to_host, to_disk = BlockStores(dropped=self._dropped), list[bytes](), list[bytes]()
        self._dropped = []
        for key, id in ids.items():
            slot = self._allot(self.host, key, to_host) if key in evicted or key in ahead else 0
            file = key if self._goes_to_disk(key) and self._allot(self.disk, key, to_disk) else b""
            if slot or file:
                stores.block_ids.append(id)
                stores.slots.append(slot)
                stores.files.append(file)
                stores.num_ahead += key not in evicted
        if not stores.block_ids and not stores.dropped:
            return None, to_host, to_disk
        self.stats.store_sizes.append(len(stores.block_ids) * self.block_bytes)
        return stores, to_host, to_disk

    def _take_ahead(self, count: int) -> dict[bytes, int]:
        """Return up to `count` blocks that will be evicted soon, so that their eviction needs no copy."""
        ahead, pool = dict[bytes, int](), self.kv.pool
        if self.host is None or not count:
            return ahead
        if pool.num_taken >= self._next_search:
            reach = int(min(pool.num_usable * AHEAD_SHARE, self.host.capacity / 2))
            self._next_search = pool.num_taken + max(reach // 4, 1)
            self._ahead = deque(block for block in pool.next_free(reach) if self._is_new(block))
        while self._ahead and len(ahead) < count:
            block = self._ahead.popleft()
            if block.key is not None and self._is_new(block):
                ahead[block.key] = block.id
        return ahead

    def _is_new(self, block: Block) -> bool:
        """Whether a block is free, and its prefix is written and not in host memory."""
        assert self.host is not None
        is_free = block.key is not None and not block.num_users
        return is_free and block.key not in self._unwritten and block.key not in self.host

    def _goes_to_disk(self, key: bytes) -> bool:
        return self.disk is not None and not self.disk_is_off and (self.salted_to_disk or not is_salted(key))

    def _allot(self, tier: TierIndex | None, key: bytes, keys: list[bytes]) -> int:
        """Return a slot of the tier for a block; 0: the block is there already, or there is no room."""
        if tier is None:
            return 0
        if key in tier:
            tier.touch(key)
            return 0
        allotted = tier.allot(key)
        if allotted is None:
            self.stats.num_failed_stores += 1
            return 0
        slot, replaced = allotted
        if tier is self.disk:
            if key in self._dropped:  # this step replaced it just now
                self._dropped.remove(key)
            self._dropped += [] if replaced is None else [replaced]
        keys.append(key)
        return slot

    def landed(self, step: int) -> None:
        """Index what a step has stored, and let the next one write its full blocks to disk."""
        done = self._steps.pop(step)
        self._commit(done)
        for key, block in done.filled:
            self._unwritten.discard(key)
            if self.disk is not None and block.key == key and key not in self.disk:
                self._full[key] = block
        self._start_loads(step)

    def _commit(self, done: _InFlight) -> None:
        for tier, keys in ((self.host, done.to_host), (self.disk, done.to_disk)):
            for key in keys:
                assert tier is not None
                tier.commit(key)

    def forget_steps(self) -> None:
        """Forget the steps in flight, which may not have stored or filled anything."""
        for step in self._steps.values():
            self._cancel(step)
        self._steps.clear()
        self._unwritten.clear()
        self._evicted.clear()
        self._full.clear()

    def _cancel(self, step: _InFlight) -> None:
        """Free the slots of what a step stores."""
        for tier, keys in ((self.host, step.to_host), (self.disk, step.to_disk)):
            for key in keys:
                assert tier is not None
                tier.cancel(key)

    @property
    def has_work(self) -> bool:
        """Whether blocks wait to be stored, or are on their way to the device."""
        return bool(self._evicted or self._full or self._dropped or self._loads or self._stray)

    def _flush(self) -> None:
        """Store what waits for the next step now; no step may be in flight."""
        stores, to_host, to_disk = self._take_stores()
        if stores is not None:
            self._copies.store(stores)
        self._commit(_InFlight([], stores, to_host, to_disk))

    # ---- loading, as an admission check

    @property
    def coming(self) -> Collection[Future[Any]]:
        """Return the copies under way; one that can be started counts as done."""
        futures: list[Future[Any]] = []
        for load in (*self._loads.values(), *self._stray):
            if load.coming is not None:
                futures.append(load.coming)
            elif not self._steps:
                futures.append(_READY)
        return futures

    def add(self, request: Request) -> None:
        """Return: the prefix is looked up when the request is about to be admitted."""

    def holds(self, request: Request, *, alone: bool = False) -> bool:
        if request.id in self._loads:
            return True
        if alone or request.id in self._tried or not self.kv.may_share(request):
            return False
        hit = self.kv.lookup(request, self._find)
        if not any(block is BELOW for table in hit.blocks for block in table):
            return False
        if len(self._loads) + len(self._stray) >= MAX_LOADS:
            return True  # it is looked up again when one of them has arrived
        assert self.running is not None
        if not self.kv.fits(hit, len(request.tokens), self.running, spare=0):
            return False
        self._load(request, hit)
        return True

    def _find(self, key: bytes) -> Block | None:
        block = self.kv.pool.find(key)
        if block is None and any(tier is not None and tier.find(key) for tier in (self.host, self.disk)):
            return BELOW
        return block

    def _load(self, request: Request, hit: Hit) -> None:
        """Allocate the blocks of a request that lie in lower tiers, and queue their copy."""
        pool, keys, places = self.kv.pool, list[bytes](), list[int]()
        shared = [
            block for table in hit.blocks for block in table if block is not None and block is not BELOW
        ]
        for table, mark in zip(hit.blocks, self.kv.marks, strict=True):
            below = [at for at, block in enumerate(table) if block is BELOW]
            keys += [request.block_keys[at] + mark for at in below]
            places += below
        load = _Load(request, shared, [], keys, places, 0)
        for key in keys:
            slot = self.host.find(key) if self.host is not None else None
            load.slots.append(slot or 0)
            self._tier_of(slot or 0).pin(key)
        pool.share(shared)
        load.blocks = pool.take(len(keys))
        load.after = self._planned + bool(self._evicted)
        self._loads[request.id] = load
        self._tried.add(request.id)

    def _start_loads(self, step: int) -> None:
        """Start the copies that wait for no step after this one."""
        for load in self._loads.values():
            if load.coming is None and load.after <= step:
                load.coming = self._copies.load(
                    BlockLoad([block.id for block in load.blocks], load.slots, load.keys)
                )

    def settle(self) -> dict[str, str | None]:
        """Index blocks that have arrived, and start the copies that can start. No request fails."""
        if not self._steps and any(load.coming is None for load in self._loads.values()):
            self._flush()
            self._start_loads(self._planned + 1)
        for id, load in list(self._loads.items()):
            if load.coming is not None and load.coming.done():
                self._arrive(load)
                del self._loads[id]
                self._held[id] = [*load.shared, *load.blocks]
                self.opened = True
        for load in [load for load in self._stray if load.coming is not None and load.coming.done()]:
            self._arrive(load)
            self._stray.remove(load)
            self.kv.pool.release([*load.shared, *load.blocks])
            self.opened = True
        return {}

    def rest(self) -> None:
        if not self._steps and (self._evicted or self._full or self._dropped):
            self._flush()

    def _arrive(self, load: _Load) -> None:
        """Index the blocks that were copied to the device. A block that could not be read is not in its tier
        any more."""
        assert load.coming is not None
        error = load.coming.exception()
        if error is not None:
            log.warning("KV cache blocks could not be loaded and are computed again: %s", error)
        done = LoadDone(failed=[*range(len(load.keys))]) if error is not None else load.coming.result()
        failed = set(done.failed)
        self.disk_is_off = self.disk_is_off or done.is_off
        for place, (key, slot, block) in enumerate(zip(load.keys, load.slots, load.blocks, strict=True)):
            tier = self._tier_of(slot)
            tier.unpin(key)
            if place not in failed:
                self.kv.pool.remember(block, key)
            elif tier.remove(key) and tier is self.disk:
                self._dropped.append(key)
        if self.kv.events is not None:
            self.kv.events.loaded(load.request, load.places, load.blocks)
        arrived = [at for at in range(len(load.keys)) if at not in failed]
        from_disk = [load.places[at] for at in arrived if not load.slots[at]]
        from_host = {load.places[at] for at in arrived if load.slots[at]} - {*from_disk}
        load.request.num_from_host = len(from_host) * self.kv.block_size
        load.request.num_from_disk = len({*from_disk}) * self.kv.block_size
        self.stats.disk_bytes += len(from_disk) * self.block_bytes
        self.stats.num_failed_loads += len(failed)
        self.stats.load_sizes.append(len(arrived) * self.block_bytes)
        self.stats.load_s += done.seconds

    def enter(self, request: Request) -> None:
        """Hand the blocks of a request to its row, which shares them next."""
        if not request.num_preemptions:
            num_hits = request.num_from_host + request.num_from_disk
            self.stats.num_queries += max(request.prompt_len - request.num_cached, 0) + num_hits
            self.stats.num_hits += num_hits
        self._release(request.id)
        self._tried.discard(request.id)

    def leave(self, request: Request) -> None:
        """Return: the prefix of a preempted request is looked up again."""

    def drop(self, request: Request) -> None:
        self._tried.discard(request.id)
        self._release(request.id)
        load = self._loads.pop(request.id, None)
        if load is None:
            return
        if load.coming is not None:
            self._stray.append(load)
            return
        for key, slot in zip(load.keys, load.slots, strict=True):
            self._tier_of(slot).unpin(key)
        self.kv.pool.release([*load.shared, *load.blocks])
        self.opened = True

    def _tier_of(self, slot: int) -> TierIndex:
        """Return the tier that a block is loaded from; slot 0 stands for the disk."""
        tier = self.host if slot else self.disk
        assert tier is not None
        return tier

    def _release(self, id: str) -> None:
        self.kv.pool.release(self._held.pop(id, []))

    def give_way(self, request: Request | None = None) -> bool:
        """Release the blocks of loaded requests that wait for a row, except those of `request`: they stay in
        the prefix cache while no other request needs them."""
        others = [id for id in self._held if request is None or id != request.id]
        for id in others:
            self._release(id)
        return bool(others)

    # ---- the whole

    def drain(self) -> None:
        until = time.monotonic() + (0.0 if self._steps else DRAIN_S)
        while (self._loads or self._stray) and time.monotonic() < until:
            self.settle()
            wait(self.coming, 1.0)
        self.give_way()

    def clear(self) -> None:
        """Empty the lower tiers; steps in flight add nothing to them."""
        for step in self._steps.values():
            self._cancel(step)
            self._dropped += step.to_disk
            step.to_host.clear()
            step.to_disk.clear()
        self._evicted.clear()
        self._full.clear()
        if self.host is not None:
            self.host.clear()
        if self.disk is not None:
            self._dropped += self.disk.clear()

    def close_disk(self) -> None:
        """Write no more blocks to disk: the weights are no longer those that its files are named by."""
        if self.disk is not None and not self.disk_is_off:
            log.warning("The weights have changed: KV cache blocks are not written to disk until a restart")
            self.disk_is_off = True

    def take_stats(self) -> TierStats:
        """Return the counts since the last call."""
        stats, self.stats = self.stats, TierStats()
        return stats
