"""A symbolic engine with lower tiers: its copies take as long as a test decides."""

from collections import Counter
from concurrent.futures import Future
from typing import Any

from symbolic import Engine, SymbolicWorker

from quire.data.kv_tiers import BlockLoad, BlockStores, LoadDone, is_state
from quire.data.step_plan import StepPlan, StepResult
from quire.sched.kv_offers import HeldEntries
from quire.sched.kv_tiers import KVTiers
from quire.sched.tier_index import EntryTiers, TierIndex

POISON = (-1, -1)
"""Content of a block while it is copied."""
Contents = list[Any]


class TieredWorker(SymbolicWorker):
    """A worker with host slots and files. It checks that nothing uses a block that is being filled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.page_slots: dict[int, Contents] = {}
        self.state_slots: dict[int, Contents] = {}
        self.files: dict[bytes, Contents] = {}
        self.loads: list[tuple[BlockLoad, Future[LoadDone]]] = []
        self.num_loaded = 0
        self.num_ahead = 0

    def run(self, plan: StepPlan) -> StepResult:
        if plan.stores is None:
            return super().run(plan)
        num_now = len(plan.stores.ids) - plan.stores.num_ahead
        self.copy_out(plan.stores, slice(num_now))
        result = super().run(plan)  # which leaves the other entries as they are
        self.copy_out(plan.stores, slice(num_now, None))
        self.num_ahead += plan.stores.num_ahead
        return result

    def read(self, id: int, key: bytes) -> Contents:
        """Return the contents of an entry on the device."""
        if is_state(key):
            return [self.checkpoints.get(id)]
        return self.cache[id * self.block_size : (id + 1) * self.block_size]

    def write(self, id: int, key: bytes, contents: Contents) -> None:
        if is_state(key):
            (self.checkpoints[id],) = contents
        else:
            self.cache[id * self.block_size : (id + 1) * self.block_size] = contents

    def copy_out(self, stores: BlockStores, part: slice = slice(None)) -> None:
        if part.start is None:
            for key in stores.dropped:
                self.files.pop(key, None)
        entries = list(zip(stores.ids, stores.keys, stores.slots, stores.to_disk, strict=True))
        for id, key, slot, is_written in entries[part]:
            contents = self.read(id, key)
            assert POISON not in contents and None not in contents, f"entry {id} is not complete"
            if slot:
                self.slots_of(key)[slot] = contents
            if is_written:
                self.files[key] = contents

    def slots_of(self, key: bytes) -> dict[int, Contents]:
        """Return the host slots for entries of this kind."""
        return self.state_slots if is_state(key) else self.page_slots

    def begin(self, load: BlockLoad) -> Future[LoadDone]:
        for id, key in zip(load.ids, load.keys, strict=True):
            self.write(id, key, [POISON] * len(self.read(id, key)))
        self.loads.append((load, Future()))
        return self.loads[-1][1]

    def finish(self, at: int, lost: int | None = None) -> None:
        """Finish a copy to the device; the entry at the place `lost` cannot be read."""
        load, future = self.loads.pop(at)
        failed = []
        for place, (id, slot, key) in enumerate(zip(load.ids, load.slots, load.keys, strict=True)):
            assert {*self.read(id, key)} == {POISON}, "written under a copy"
            contents = self.slots_of(key).get(slot) if slot else self.files.get(key)
            if contents is None or place == lost:
                failed.append(place)
                assert place == lost, f"a {'slot' if slot else 'file'} was freed while it was read"
                continue
            self.write(id, key, contents)
            self.num_loaded += 1
        future.set_result(LoadDone(failed))


class TieredEngine(Engine):
    """An engine with `num_host` blocks in host memory and `num_files` on disk, and half as many checkpoints
    of states."""

    def __init__(
        self,
        *,
        num_host: int = 0,
        num_files: int = 0,
        waits: bool = False,
        salted: bool = False,
        **limits: Any,
    ) -> None:
        self.num_host, self.num_files, self.salted = num_host, num_files, salted
        self.now = 0.0
        self.waits = waits
        """Whether copies to the device end only when the test finishes them."""
        super().__init__(**limits)
        self.use(TieredWorker)

    def open_tiers(self) -> None:
        kv, counts = self.kv, (self.num_host, self.num_files)
        hosts = [TierIndex(count) if count else None for count in counts]
        pages = EntryTiers(kv.pool, 1, *hosts) if kv.has_pages else None
        states = None
        if kv.states is not None:
            hosts = [TierIndex(-(-count // 2)) if count else None for count in counts]
            states = EntryTiers(kv.states.pool, 1, *hosts)
        self.tiers = KVTiers(
            kv, self, pages=pages, states=states, salted_to_disk=self.salted, clock=lambda: self.now
        )

    @property
    def copier(self) -> TieredWorker:
        assert isinstance(self.worker, TieredWorker)
        return self.worker

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        for id, key in zip(load.ids, load.keys, strict=True):
            kind = self.tiers.stores.kind_of(key)
            assert kind is not None
            block = kind.pool.blocks[id]
            assert block.num_users == 1 and block.key is None, f"{block} is filled while it is used"
        future = self.copier.begin(load)
        if not self.waits:
            self.copier.finish(-1)
        return future

    def store(self, stores: BlockStores) -> None:
        assert self.device.is_quiet, "a step is in flight"
        self.copier.copy_out(stores)

    def _held(self) -> list[HeldEntries]:
        loads = [*self.tiers._loads.values(), *self.tiers._orphaned]
        return [*self.tiers._held.values(), *(load.held for load in loads)]

    def waiting_users(self) -> dict[int, int]:
        users = Counter(block.id for held in self._held() for block in held.pages)
        copied = [
            id
            for load, _ in self.copier.loads
            for id, key in zip(load.ids, load.keys, strict=True)
            if not is_state(key)
        ]
        assert len(copied) == len({*copied}), "a block is filled by two copies"
        for id in copied:
            assert users[id] == 1 and self.kv.pool.blocks[id].key is None, "a block under copy is shared"
        return dict(users)

    def check_slots(self) -> None:
        """Check that the slots of checkpoints that are held are those of waiting requests."""
        if self.kv.states is not None:
            users = Counter(block.id for held in self._held() for block in held.states)
            pool = self.kv.states.pool
            assert all(block.num_users == users[block.id] for block in pool.blocks[1:])
            assert pool.num_free == pool.num_usable - len(users)

    def lose_file(self, number: int) -> None:
        """Let a worker report that it has not written one of the files that are not being read."""
        pins = {key for kind in self.tiers.stores.kinds if kind.disk is not None for key in kind.disk._pins}
        if files := [key for key in self.copier.files if key not in pins]:
            key = files[number % len(files)]
            del self.copier.files[key]
            self.tiers._record(LoadDone(lost_writes=[key]))

    def finish_all(self) -> None:
        while self.copier.loads:
            self.copier.finish(0)

    def check_tiers(self) -> None:
        """Check that nothing is pinned or on its way, and that each entry has its contents."""
        assert not self.tiers._held and not self.tiers._loads and not self.tiers._orphaned
        stores = self.tiers.stores
        assert not self.tiers._looked_up and not stores.unwritten
        for tier in (tier for kind in stores.kinds for tier in kind):
            assert not tier.num_pinned and not tier.num_being_copied and len(tier) <= tier.capacity
            slots = [*tier._slots.values(), *tier._free_slots]
            assert len(slots) == len({*slots}) == tier._num_numbered, "slots leaked"
        files = {key for kind in stores.kinds if kind.disk is not None for key in kind.disk._slots}
        assert files == {*self.copier.files}, "files leaked"
