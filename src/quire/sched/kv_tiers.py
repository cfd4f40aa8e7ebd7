"""KVTiers: entries of the KV cache in host memory and on disk.

An entry is a block of pages, or a checkpoint of states. If the prefix of a request continues in a lower tier,
the request waits while its entries are copied to the device, beside the steps of others. It holds them until
it is admitted."""

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.data.kv_tiers import BlockLoad, BlockStores, LoadDone, is_state
from quire.data.request import Request
from quire.data.stats import TierStats
from quire.logs import get_logger
from quire.sched.blocks import Block
from quire.sched.kv_manager import Hit, KVManager
from quire.sched.running import Running
from quire.sched.tier_index import EntryTiers
from quire.sched.tier_stores import TierStores

log = get_logger(__name__)

BELOW = Block(-1)
"""Stands in a `Hit` for a block that only a lower tier holds."""
MAX_LOADS = 8
"""Most requests with entries on their way to the device at the same time."""
DRAIN_S = 60.0
"""Seconds to wait for the copies under way when the cache is reset."""
REPORT_S = 1.0
"""Seconds between two reports of the workers about what they have stored."""


_READY: Future[Any] = Future()
_READY.set_result(None)


class TierCopies(Protocol):
    """The workers, which copy entries."""

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        """Copy entries to the device while steps run."""

    def store(self, stores: BlockStores) -> None:
        """Copy entries to lower tiers now, after the submitted steps."""


@dataclass(slots=True)
class HeldEntries:
    """Entries on the device that a request holds before it has a row."""

    pages: list[Block] = field(default_factory=list)
    states: list[Block] = field(default_factory=list)


@dataclass(slots=True)
class _Load:
    """Entries of a request on their way to the device."""

    request: Request
    held: HeldEntries
    """Entries of its prefix that are on the device, and those that are being filled."""
    entries: list[Block]
    """Entries that are being filled; they are neither indexed nor free."""
    keys: list[bytes]
    places: list[range]
    """Blocks of the prefix that each entry restores: one, or with a checkpoint of states all before it."""
    after: int
    """The copy starts when this step is done: until then, steps may use the entries."""
    slots: list[int] = field(default_factory=list)
    coming: Future[LoadDone] | None = None
    """None: the copy has not started."""


class KVTiers:
    """The lower tiers of the KV cache. It is the admission check of requests that wait for their entries."""

    def __init__(
        self,
        kv: KVManager,
        copies: TierCopies,
        *,
        pages: EntryTiers | None = None,
        states: EntryTiers | None = None,
        salted_to_disk: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the tiers of a cache. `pages` or `states` is None if the model has none of them."""
        assert (states is None) == (kv.states is None) and (pages is None) == (not kv.has_pages)
        self.kv = kv
        self.stores = TierStores(pages, states, salted_to_disk=salted_to_disk)
        self.opened = False
        self.running: Running | None = None
        self.stats = TierStats()
        self._copies = copies
        self._clock = clock
        self._next_report = clock() + REPORT_S
        self._report: Future[LoadDone] | None = None
        """A report of the workers that is awaited."""
        self._loads: dict[str, _Load] = {}
        """Copies to the device, by request id."""
        self._stray: list[_Load] = []
        """Copies to the device for requests that have ended."""
        self._held: dict[str, HeldEntries] = {}
        """Entries of loaded requests that wait for a row, by request id."""
        self._tried: set[str] = set()
        """Waiting requests that have loaded their entries once."""
        kv.tiers = self

    # ---- storing

    def note_evicted(self, blocks: list[Block]) -> None:
        self.stores.note_evicted(blocks)

    def plan(self, step: int, fresh: Iterable[Block]) -> BlockStores | None:
        return self.stores.plan(step, fresh)

    def landed(self, step: int) -> None:
        self.stores.landed(step)
        self._start_loads(step)

    def forget_steps(self) -> None:
        self.stores.forget_steps()

    @property
    def has_work(self) -> bool:
        """Whether entries wait to be stored, or are on their way to the device."""
        return bool(self.stores.are_waiting or self._loads or self._stray)

    def _flush(self) -> None:
        """Store what waits for the next step now; no step may be in flight."""
        stores = self.stores.take_now()
        if stores is not None:
            self._copies.store(stores)

    # ---- loading, as an admission check

    @property
    def coming(self) -> Collection[Future[Any]]:
        """Return the copies under way; one that can be started counts as done."""
        futures: list[Future[Any]] = []
        for load in (*self._loads.values(), *self._stray):
            if load.coming is not None:
                futures.append(load.coming)
            elif not self.stores.steps:
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
        missing = self._missing(request, hit)
        if not missing:
            return False
        if len(self._loads) + len(self._stray) >= MAX_LOADS:
            return True  # it is looked up again when one of them has arrived
        assert self.running is not None
        if not self.kv.fits(hit, len(request.tokens), self.running, spare=0):
            return False
        if self.kv.states is not None and not self.kv.states.pool.num_free:
            return False
        self._load(request, hit, missing)
        return True

    def _find(self, key: bytes) -> Block | None:
        block = self.kv.pool.find(key)
        kind = self.stores.kind_of(key)
        return BELOW if block is None and kind is not None and kind.holds(key) else block

    def _missing(self, request: Request, hit: Hit) -> dict[bytes, range]:
        """Return the keys of a hit's entries that are in lower tiers, each with the blocks of the prefix that
        it restores."""
        missing = dict[bytes, range]()
        for table, mark in zip(hit.blocks, self.kv.marks, strict=True):
            for at, block in enumerate(table):
                if block is BELOW:
                    missing[request.block_keys[at] + mark] = range(at, at + 1)
        key = self.kv.state_key(request, hit)
        if key is not None and self._find(key) is BELOW:
            size = self.kv.block_size
            missing[key] = range(self.kv.lookup(request).num_tokens // size, hit.num_tokens // size)
        return missing

    def _load(self, request: Request, hit: Hit, missing: dict[bytes, range]) -> None:
        """Allocate the entries of a request that lie in lower tiers, and queue their copy."""
        held = HeldEntries(
            [block for table in hit.blocks for block in table if block is not None and block is not BELOW]
        )
        key = self.kv.state_key(request, hit)
        if key is not None and key not in missing and (state := self.kv.pool.find(key)) is not None:
            held.states.append(state)
        load = _Load(request, held, [], [*missing], [*missing.values()], 0)
        for key in load.keys:
            kind = self._kind_of(key)
            slot = kind.host.find(key) if kind.host is not None else None
            load.slots.append(slot or 0)
            kind.source(slot or 0).pin(key)
        self.kv.pool.share(held.pages)
        if self.kv.states is not None:
            self.kv.states.pool.share(held.states)
        num_states = sum(map(is_state, load.keys))  # behind the pages
        pages = self.kv.pool.take(len(load.keys) - num_states)
        states = self.kv.states.pool.take(num_states) if self.kv.states is not None else []
        load.entries = [*pages, *states]
        held.pages += pages
        held.states += states
        load.after = self.stores.planned + bool(self.stores.evicted)
        self._loads[request.id] = load
        self._tried.add(request.id)

    def _kind_of(self, key: bytes) -> EntryTiers:
        kind = self.stores.kind_of(key)
        assert kind is not None
        return kind

    def _start_loads(self, step: int) -> None:
        """Start the copies that wait for no step after this one."""
        for load in self._loads.values():
            if load.coming is None and load.after <= step:
                load.coming = self._copies.load(
                    BlockLoad([block.id for block in load.entries], load.slots, load.keys)
                )

    def settle(self) -> dict[str, str | None]:
        """Index entries that have arrived, and start the copies that can start. No request fails."""
        if not self.stores.steps and any(load.coming is None for load in self._loads.values()):
            self._flush()
            self._start_loads(self.stores.planned + 1)
        for id, load in list(self._loads.items()):
            if load.coming is not None and load.coming.done():
                self._arrive(load)
                del self._loads[id]
                self._held[id] = load.held
                self.opened = True
        for load in [load for load in self._stray if load.coming is not None and load.coming.done()]:
            self._arrive(load)
            self._stray.remove(load)
            self._release(load.held)
            self.opened = True
        self._settle_report()
        return {}

    def _settle_report(self) -> None:
        """Count what the workers have stored; ask them from time to time, since stores have no result."""
        if self._report is not None and self._report.done():
            if self._report.exception() is None:
                self._count(self._report.result())
            self._report = None
        if self._report is None and self.stores.is_unreported and self._clock() >= self._next_report:
            self.stores.is_unreported = False
            self._next_report = self._clock() + REPORT_S
            self._report = self._copies.load(BlockLoad([], [], []))

    def rest(self) -> None:
        if not self.stores.steps and self.stores.are_waiting:
            self._flush()

    def _arrive(self, load: _Load) -> None:
        """Index the entries that were copied to the device. One that could not be read is not in its tier any
        more."""
        assert load.coming is not None
        error = load.coming.exception()
        if error is not None:
            log.warning("KV cache blocks could not be loaded and are computed again: %s", error)
        done = LoadDone(failed=[*range(len(load.keys))]) if error is not None else load.coming.result()
        failed, num_bytes = set(done.failed), 0
        by_tier: dict[bool, set[int]] = {False: set(), True: set()}
        for at, (key, slot, block) in enumerate(zip(load.keys, load.slots, load.entries, strict=True)):
            kind = self._kind_of(key)
            tier = kind.source(slot)
            tier.unpin(key)
            if at not in failed:
                kind.pool.remember(block, key)
                by_tier[not slot].update(load.places[at])
                num_bytes += kind.entry_bytes
                self.stats.disk_bytes += 0 if slot else kind.entry_bytes
            elif tier.remove(key) and tier is kind.disk:
                self.stores.dropped.append(key)
        if self.kv.events is not None:
            self.kv.events.loaded(load.request, [blocks[-1] for blocks in load.places], load.entries)
        size = self.kv.block_size
        load.request.num_from_host = len(by_tier[False] - by_tier[True]) * size
        load.request.num_from_disk = len(by_tier[True]) * size
        self.stats.num_failed_loads += len(failed)
        self.stats.load_sizes.append(num_bytes)
        self._count(done)

    def _count(self, done: LoadDone) -> None:
        self.stores.disk_is_off = self.stores.disk_is_off or done.is_off
        self.stats.load_s += done.seconds
        self.stats.store_s += done.store_s
        self.stats.disk_read_s += done.read_s
        self.stats.disk_write_s += done.write_s
        self.stats.disk_written_bytes += done.written_bytes

    def enter(self, request: Request) -> None:
        """Hand the entries of a request to its row, which shares them next."""
        if not request.num_preemptions:
            num_hits = request.num_loaded
            self.stats.num_queries += max(request.prompt_len - request.num_cached, 0) + num_hits
            self.stats.num_hits += num_hits
        self._release(self._held.pop(request.id, None))
        self._tried.discard(request.id)

    def leave(self, request: Request) -> None:
        """Return: the prefix of a preempted request is looked up again."""

    def drop(self, request: Request) -> None:
        self._tried.discard(request.id)
        self._release(self._held.pop(request.id, None))
        load = self._loads.pop(request.id, None)
        if load is None:
            return
        if load.coming is not None:
            self._stray.append(load)
            return
        for key, slot in zip(load.keys, load.slots, strict=True):
            self._kind_of(key).source(slot).unpin(key)
        self._release(load.held)
        self.opened = True

    def _release(self, held: HeldEntries | None) -> None:
        if held is None:
            return
        self.kv.pool.release(held.pages)
        if self.kv.states is not None:
            self.kv.states.pool.release(held.states)

    def give_way(self, request: Request | None = None) -> bool:
        """Release the entries of loaded requests that wait for a row, except those of `request`: they stay in
        the prefix cache while no other request needs them."""
        others = [id for id in self._held if request is None or id != request.id]
        for id in others:
            self._release(self._held.pop(id))
        return bool(others)

    # ---- the whole

    def drain(self) -> None:
        until = self._clock() + (0.0 if self.stores.steps else DRAIN_S)
        while (self._loads or self._stray) and self._clock() < until:
            self.settle()
            wait(self.coming, 1.0)
        self.give_way()

    def clear(self) -> None:
        self.stores.clear()

    def close_disk(self) -> None:
        """Write no more entries to disk: the weights are no longer those that its files are named by."""
        if any(kind.disk is not None for kind in self.stores.kinds) and not self.stores.disk_is_off:
            log.warning("The weights have changed: KV cache blocks are not written to disk until a restart")
            self.stores.disk_is_off = True

    def take_stats(self) -> TierStats:
        """Return the counts since the last call."""
        stats, self.stats, stores = self.stats, TierStats(), self.stores
        stats.store_sizes, stores.sizes = stores.sizes, []
        stats.num_failed_stores, stores.num_failed = stores.num_failed, 0
        return stats
