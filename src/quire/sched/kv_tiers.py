"""KVTiers: entries of the KV cache in host memory, on disk and in other engines.

An entry is a KV block, or a checkpoint of SSM states. If the prefix of a request continues in a lower tier,
or in the engine that has computed it, the request waits while its entries are copied to the device; steps of
other requests run meanwhile. The request holds the entries until it is admitted."""

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from quire.data.kv_tiers import REMOTE, STATE_MARK, BlockLoad, BlockStores, LoadDone, is_state
from quire.data.kv_transfer import RemotePrefix
from quire.data.request import Request
from quire.data.stats import TierStats
from quire.logs import get_logger
from quire.sched.blocks import Block
from quire.sched.kv_manager import Find, Hit, KVManager
from quire.sched.kv_offers import HeldEntries, KVOffers
from quire.sched.running import Running
from quire.sched.tier_index import IN_LOWER_TIER, EntryTiers
from quire.sched.tier_stores import TierStores

log = get_logger(__name__)

MAX_LOADS = 8
"""Maximum number of requests with entries on their way to the device at the same time."""
DRAIN_S = 60.0
"""Seconds to wait for the copies under way when the cache is reset."""
REPORT_S = 1.0
"""Seconds between two reports of the workers about what they have stored."""


_READY: Future[Any] = Future()
_READY.set_result(None)


class TierCopies(Protocol):
    """Copies entries between the device and the lower tiers; the workers do this."""

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        """Start to copy entries to the device while steps run; the future returns the result."""

    def store(self, stores: BlockStores) -> None:
        """Copy entries to lower tiers now, after the submitted steps."""


@dataclass(slots=True)
class _Load:
    """The copy of a request's prefix from lower tiers, or from another engine, to the device."""

    request: Request
    held: HeldEntries
    """Entries of its prefix that are on the device, and those that are being filled."""
    entries: list[Block]
    """Entries that are being filled; they are neither indexed nor free."""
    keys: list[bytes]
    places: list[range]
    """Blocks of the prefix that each entry restores: one per KV block, several per checkpoint of SSM
    states."""
    after: int
    """Number of the step after which the copy starts; until then, steps may use the entries."""
    slots: list[int] = field(default_factory=list)
    remote: RemotePrefix | None = None
    """Prefix in another engine that some of the entries may belong to."""
    future: Future[LoadDone] | None = None
    """Result of the copy; None: the copy has not started."""


class KVTiers:
    """The lower tiers of the KV cache, and the admission check of requests that wait for their entries."""

    def __init__(
        self,
        kv: KVManager,
        copies: TierCopies,
        *,
        pages: EntryTiers | None = None,
        states: EntryTiers | None = None,
        salted_to_disk: bool = False,
        offers: KVOffers | None = None,
        takes_remote: bool = False,
        remote_fails: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the tiers of a cache. `pages` are the tiers of KV blocks, `states` those of SSM state
        checkpoints; None if the model has no such entries. `offers` keeps prefixes for other engines. With
        `takes_remote`, prefixes of other engines are loaded. With `remote_fails`, a request fails if its
        prefix cannot be loaded from another engine."""
        assert (states is None) == (kv.states is None) and (pages is None) == (not kv.has_pages)
        self.kv = kv
        self.stores = TierStores(pages, states, salted_to_disk=salted_to_disk)
        self.needs_recheck = False
        self.running: Running | None = None
        self.stats = TierStats()
        self._copies = copies
        self._clock = clock
        self.offers = offers
        self._takes_remote, self._remote_fails = takes_remote, remote_fails
        self._failed: dict[str, str | None] = {}
        """Ids of requests that fail because their prefix in another engine could not be loaded; the values
        are None."""
        self._next_report = clock() + REPORT_S
        self._reports: list[Future[LoadDone]] = []
        """Calls of the workers that load no entries: they fetch statistics of the workers, or release
        prefixes in other engines."""
        self._loads: dict[str, _Load] = {}
        """Copies to the device, by request id."""
        self._orphaned: list[_Load] = []
        """Copies to the device for requests that have ended."""
        self._held: dict[str, HeldEntries] = {}
        """Entries of loaded requests that wait for a row, by request id."""
        self._looked_up: set[str] = set()
        """Ids of waiting requests whose load was started once; they are not looked up again."""
        for kind in self.stores.kinds:
            for name, tier in (("host", kind.host), ("disk", kind.disk)):
                if tier is not None:
                    tier.on_evicted = partial(self._note_evicted_from, name)
        kv.tiers = self

    # ---- storing

    def note_evicted(self, blocks: list[Block]) -> None:
        self.stores.note_evicted(blocks)

    def _note_evicted_from(self, tier: str, key: bytes) -> None:
        self.kv.reasons.evicted([key], tier)

    def plan(self, step: int, fresh: Iterable[Block]) -> BlockStores | None:
        return self.stores.plan(step, fresh)

    def finish_step(self, step: int) -> None:
        self.stores.finish_step(step)
        self._start_loads(step)

    def forget_steps(self) -> None:
        self.stores.forget_steps()

    @property
    def has_work(self) -> bool:
        """Whether entries wait to be stored, or are on their way to the device."""
        return bool(self.stores.are_waiting or self._loads or self._orphaned)

    @property
    def keeps_evicted(self) -> bool:
        return any(True for kind in self.stores.kinds for _ in kind)

    def _flush(self) -> None:
        """Copy the entries that wait for the next step to lower tiers now; no step may be in flight."""
        stores = self.stores.take_now()
        if stores is not None:
            self._copies.store(stores)

    # ---- loading, as an admission check

    @property
    def futures(self) -> Collection[Future[Any]]:
        """Return the futures of copies under way, with a finished future for each copy that can be started
        now."""
        futures: list[Future[Any]] = []
        for load in (*self._loads.values(), *self._orphaned):
            if load.future is not None:
                futures.append(load.future)
            elif not self.stores.steps:
                futures.append(_READY)
        return futures

    def add(self, request: Request) -> None:
        """Do nothing: the prefix is looked up when the request is about to be admitted."""

    def hold_back(self, request: Request, *, alone: bool = False) -> bool:
        if request.id in self._loads:
            return True
        if alone or request.id in self._looked_up or not self.kv.may_share(request):
            return False
        if any(load.remote == request.remote is not None for load in self._loads.values()):
            return True  # another sequence of the same request loads this prompt
        find = partial(self._find, remote=self._remote_keys(request))
        began = self._clock()
        hit = self.kv.lookup(request, find)
        missing = self._missing(request, hit, find)
        self.stats.lookup_s.append(self._clock() - began)
        if not missing:
            return False
        if len(self._loads) + len(self._orphaned) >= MAX_LOADS:
            return True  # it is looked up again when one of the loads has ended
        assert self.running is not None
        if not self.kv.fits(hit, len(request.tokens), self.running, spare=0):
            return False
        if self.kv.states is not None and not self.kv.states.pool.num_free:
            return False
        self._load(request, hit, missing)
        return True

    def _find(self, key: bytes, remote: Collection[bytes] = ()) -> Block | None:
        block = self.kv.pool.find(key)
        kind = self.stores.kind_of(key)
        is_below = block is None and kind is not None and (key in remote or kind.holds(key))
        return IN_LOWER_TIER if is_below else block

    def _remote_keys(self, request: Request) -> Collection[bytes]:
        """Return the keys of all entries that the prefix of a request in another engine may have."""
        if request.remote is None or not self._takes_remote:
            return ()
        self.kv.lookup(request)  # computes `request.block_keys`
        num_tokens = request.remote.num_tokens
        count = None if num_tokens is None else num_tokens // self.kv.block_size
        marks = (*self.kv.marks, STATE_MARK)
        return {key + mark for key in request.block_keys[:count] for mark in marks}

    def _missing(self, request: Request, hit: Hit, find: Find) -> dict[bytes, range]:
        """Return the keys of those entries of a hit that are in lower tiers and not on the device, each with
        the block numbers of the prefix that the entry restores."""
        missing = dict[bytes, range]()
        for table, mark in zip(hit.blocks, self.kv.marks, strict=True):
            for at, block in enumerate(table):
                if block is IN_LOWER_TIER:
                    missing[request.block_keys[at] + mark] = range(at, at + 1)
        key = self.kv.state_key(request, hit)
        if key is not None and find(key) is IN_LOWER_TIER:
            size = self.kv.block_size
            missing[key] = range(self.kv.lookup(request).num_tokens // size, hit.num_tokens // size)
        return missing

    def _load(self, request: Request, hit: Hit, missing: dict[bytes, range]) -> None:
        """Allocate the entries of a request that lie in lower tiers or another engine, and queue their
        copy."""
        held = HeldEntries.of(self.kv, request, hit)
        load = _Load(request, held, [], [*missing], [*missing.values()], 0)
        load.remote, request.remote = request.remote, None
        for key in load.keys:
            kind = self._kind_of(key)
            load.slots.append(kind.slot(key))
            if (tier := kind.source(load.slots[-1])) is not None:
                tier.pin(key)
        held.share(self.kv)
        num_states = sum(map(is_state, load.keys))  # states come behind the pages
        pages = self.kv.pool.take(len(load.keys) - num_states)
        states = self.kv.states.pool.take(num_states) if self.kv.states is not None else []
        load.entries = [*pages, *states]
        held.pages += pages
        held.states += states
        load.after = self.stores.planned + bool(self.stores.evicted)
        self._loads[request.id] = load
        self._looked_up.add(request.id)

    def _kind_of(self, key: bytes) -> EntryTiers:
        kind = self.stores.kind_of(key)
        assert kind is not None
        return kind

    def _start_loads(self, step: int) -> None:
        """Start the copies to the device that may start once step number `step` is done."""
        for load in self._loads.values():
            if load.future is None and load.after <= step:
                ids = [block.id for block in load.entries]
                load.future = self._copies.load(BlockLoad(ids, load.slots, load.keys, load.remote))

    def settle(self) -> dict[str, str | None]:
        """Index entries that have arrived, and start the copies that can start. Return the requests that fail
        because their prefix could not be loaded from another engine."""
        if not self.stores.steps and any(load.future is None for load in self._loads.values()):
            self._flush()
            self._start_loads(self.stores.planned + 1)
        for id, load in list(self._loads.items()):
            if load.future is not None and load.future.done():
                self._finish_load(load)
                del self._loads[id]
                self._held[id] = load.held
                self.needs_recheck = True
        for load in [load for load in self._orphaned if load.future is not None and load.future.done()]:
            self._finish_load(load)
            self._orphaned.remove(load)
            load.held.release(self.kv)
            self.needs_recheck = True
        self._settle_reports()
        self._settle_offers()
        failed, self._failed = self._failed, {}
        return failed

    def _settle_reports(self) -> None:
        """Add the workers' reports to the statistics of copies. Request a new report at most every `REPORT_S`
        seconds, because copies to lower tiers have no result of their own."""
        for report in [report for report in self._reports if report.done()]:
            self._reports.remove(report)
            if report.exception() is None:
                done = report.result()
                self.stats.num_failed_releases += bool(done.remote_problem)
                self._record(done)
        if self.stores.is_unreported and self._clock() >= self._next_report:
            self.stores.is_unreported = False
            self._next_report = self._clock() + REPORT_S
            self._reports.append(self._copies.load(BlockLoad([], [], [])))

    def _settle_offers(self) -> None:
        if self.offers is not None and self.offers.settle():
            self.needs_recheck = True

    def flush_stores(self) -> None:
        if not self.stores.steps and self.stores.are_waiting:
            self._flush()

    def _finish_load(self, load: _Load) -> None:
        """Index the entries that were copied to the device. An entry that could not be read is removed
        from its tier."""
        assert load.future is not None
        error = load.future.exception()
        if error is not None:
            log.warning("Offloaded KV cache blocks could not be loaded and are computed again: %s", error)
        done = LoadDone(failed=[*range(len(load.keys))]) if error is not None else load.future.result()
        failed, num_bytes = set(done.failed), 0
        from_host, from_disk, from_remote = set[int](), set[int](), set[int]()
        num_remote = num_remote_bytes = 0
        for at, (key, slot, block) in enumerate(zip(load.keys, load.slots, load.entries, strict=True)):
            kind = self._kind_of(key)
            tier = kind.source(slot)
            if tier is not None:
                tier.unpin(key)
            if at not in failed:
                kind.pool.remember(block, key)
                num_bytes += kind.entry_bytes
                if tier is None:
                    from_remote.update(load.places[at])
                    num_remote += 1
                    num_remote_bytes += kind.entry_bytes
                else:
                    (from_host if slot else from_disk).update(load.places[at])
                    self.stats.disk_bytes += 0 if slot else kind.entry_bytes
            elif tier is not None and tier.remove(key) and tier is kind.disk:
                self.stores.dropped.append(key)
        if self.kv.events is not None:
            self.kv.events.loaded(load.request, [blocks[-1] for blocks in load.places], load.entries)
        size = self.kv.block_size
        load.request.num_from_host = len(from_host - from_disk - from_remote) * size
        load.request.num_from_disk = len(from_disk - from_remote) * size
        load.request.num_from_remote = len(from_remote) * size
        self.stats.num_failed_loads += sum(load.slots[at] != REMOTE for at in failed)
        self.stats.load_sizes.append(num_bytes)
        if num_remote:
            self.stats.transfer_s.append(done.seconds)
            self.stats.transfer_bytes.append(num_remote_bytes)
            self.stats.transfer_entries.append(num_remote)
        if any(load.slots[at] == REMOTE for at in failed):
            self._note_failed_transfer(load, done.remote_problem)
        self._record(done)

    def _note_failed_transfer(self, load: _Load, problem: str) -> None:
        """Count and log a prefix that could not be loaded completely from another engine."""
        assert load.remote is not None
        self.stats.num_failed_transfers += 1
        log.warning(
            "The prefix of request %s could not be loaded from the engine at %s:%d and %s: %s",
            *(load.request.id, load.remote.host, load.remote.port),
            *("the request fails" if self._remote_fails else "is computed here", problem or "an error here"),
        )
        if self._remote_fails and self._loads.get(load.request.id) is load:
            self._failed[load.request.id] = None

    def _record(self, done: LoadDone) -> None:
        self.stores.disk_is_off = self.stores.disk_is_off or done.is_off
        self.stores.withdraw(done.lost_writes)
        self.stats.num_lost_writes += len(done.lost_writes)
        self.stats.load_s += done.seconds
        self.stats.store_s += done.store_s
        self.stats.disk_read_s += done.read_s
        self.stats.disk_write_s += done.write_s
        self.stats.disk_written_bytes += done.written_bytes

    def enter(self, request: Request) -> None:
        """Count the loaded tokens of a request, and release the entries held for it: its row shares them
        next."""
        if not request.num_preemptions:
            num_hits = request.num_loaded
            self.stats.num_queries += max(request.prompt_len - request.num_cached, 0) + num_hits
            self.stats.num_hits += num_hits
            if any(kind.disk is not None for kind in self.stores.kinds):
                num_read, size = request.num_from_disk, self.kv.block_size
                self.stats.disk_hits += num_read // size
                self.stats.disk_queries += max(request.prompt_len - request.num_cached + num_read, 0) // size
        self._release(request)
        self._looked_up.discard(request.id)
        self._release_remote(request)

    def release_remote(self, prefix: RemotePrefix) -> None:
        if self._takes_remote:
            self._reports.append(self._copies.load(BlockLoad([], [], [], prefix)))

    def _release_remote(self, request: Request) -> None:
        """Let the other engine release its prefix for a request that does not load it."""
        if request.remote is not None:
            self.release_remote(request.remote)
            request.remote = None

    def leave(self, request: Request) -> None:
        """Do nothing: the prefix of a preempted request is looked up again."""

    def drop(self, request: Request) -> None:
        self._looked_up.discard(request.id)
        self._release(request)
        self._release_remote(request)
        load = self._loads.pop(request.id, None)
        if load is None:
            return
        if load.future is not None:
            self._orphaned.append(load)
            return
        for key, slot in zip(load.keys, load.slots, strict=True):
            if (tier := self._kind_of(key).source(slot)) is not None:
                tier.unpin(key)
        load.held.release(self.kv)
        self.needs_recheck = True
        request.remote = load.remote
        self._release_remote(request)

    def _release(self, request: Request) -> None:
        if (held := self._held.pop(request.id, None)) is not None:
            held.release(self.kv)

    def release_waiting(self, request: Request | None = None) -> bool:
        """Release the entries of loaded requests that wait for a row, except those of `request`: they stay in
        the prefix cache while no other request needs them. If there are none and no request runs, release
        the oldest prefix that is kept for another engine. Return whether anything was released."""
        others = [id for id in self._held if request is None or id != request.id]
        for id in others:
            self._held.pop(id).release(self.kv)
        if others or self.offers is None or self.running is None or len(self.running):
            return bool(others)
        return self.offers.withdraw_oldest("a request needs its blocks, and nothing else runs")

    # ---- prefixes for other engines

    def offer(self, request: Request, reason: str) -> dict[str, Any] | None:
        if self.offers is None or not request.offers or reason not in ("stop", "length"):
            return None
        return self.offers.offer(request)

    # ---- reset, end and statistics

    def drain(self) -> None:
        if self.offers is not None:
            self.offers.withdraw_all("the cache is reset")
        until = self._clock() + (0.0 if self.stores.steps else DRAIN_S)
        while (self._loads or self._orphaned) and self._clock() < until:
            self.settle()
            wait(self.futures, 1.0)
        self.release_waiting()

    def clear(self) -> None:
        self.stores.clear()

    def close(self) -> None:
        if self.offers is not None:
            self.offers.on_close()

    def weights_changed(self) -> None:
        """Stop writing entries to disk and exchanging them with other engines. The names of the files, and
        the other engines, belong to the old weights."""
        if self.offers is not None or self._takes_remote:
            log.warning(
                "The weights have changed: prefixes are not exchanged with other engines until a restart"
            )
            self.close()
            self.offers, self._takes_remote = None, False
        if any(kind.disk is not None for kind in self.stores.kinds) and not self.stores.disk_is_off:
            log.warning("The weights have changed: KV cache blocks are not written to disk until a restart")
            self.stores.disk_is_off = True

    def take_stats(self) -> TierStats:
        """Return the statistics of copies since the last call, and reset them."""
        if self.offers is not None:
            self._settle_offers()
            self.stats.num_expired_offers, self.offers.num_expired = self.offers.num_expired, 0
        stats, self.stats, stores = self.stats, TierStats(), self.stores
        stats.store_sizes, stores.sizes = stores.sizes, []
        stats.num_failed_stores, stores.num_failed = stores.num_failed, 0
        hosts = [kind.host for kind in stores.kinds if kind.host is not None]
        if hosts:
            capacity = sum(host.capacity for host in hosts)
            stats.host_read_share = sum(host.num_pinned for host in hosts) / capacity
            stats.host_write_share = sum(host.num_being_copied for host in hosts) / capacity
        return stats
