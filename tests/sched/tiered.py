"""A symbolic engine with lower tiers: its copies take as long as a test decides."""

from concurrent.futures import Future
from typing import Any

from symbolic import Engine, SymbolicWorker

from quire.data.kv_tiers import BlockLoad, BlockStores, LoadDone
from quire.data.step_plan import StepPlan, StepResult
from quire.sched.kv_tiers import KVTiers
from quire.sched.tier_index import TierIndex

POISON = (-1, -1)
"""Content of a block while it is copied."""
Contents = list[Any]


class TieredWorker(SymbolicWorker):
    """A worker with host slots and files. It checks that nothing uses a block that is being filled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.host: dict[int, Contents] = {}
        self.files: dict[bytes, Contents] = {}
        self.loads: list[tuple[BlockLoad, Future[LoadDone]]] = []
        self.num_loaded = 0
        self.num_ahead = 0

    def run(self, plan: StepPlan) -> StepResult:
        if plan.stores is None:
            return super().run(plan)
        num_now = len(plan.stores.block_ids) - plan.stores.num_ahead
        self.copy_out(plan.stores, slice(num_now))
        result = super().run(plan)  # which leaves the other blocks as they are
        self.copy_out(plan.stores, slice(num_now, None))
        self.num_ahead += plan.stores.num_ahead
        return result

    def _pages(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def copy_out(self, stores: BlockStores, part: slice = slice(None)) -> None:
        if part.start is None:
            for key in stores.dropped:
                self.files.pop(key, None)
        entries = list(zip(stores.block_ids, stores.slots, stores.files, strict=True))
        for block_id, slot, file in entries[part]:
            contents = self.cache[self._pages(block_id)]
            assert POISON not in contents and None not in contents, f"block {block_id} is not complete"
            if slot:
                self.host[slot] = contents
            if file:
                self.files[file] = contents

    def begin(self, load: BlockLoad) -> Future[LoadDone]:
        for block_id in load.block_ids:
            self.cache[self._pages(block_id)] = [POISON] * self.block_size
        self.loads.append((load, Future()))
        return self.loads[-1][1]

    def finish(self, at: int, lost: int | None = None) -> None:
        """Finish a copy to the device; the block at the place `lost` cannot be read."""
        load, future = self.loads.pop(at)
        failed = []
        for place, (block_id, slot, key) in enumerate(
            zip(load.block_ids, load.slots, load.keys, strict=True)
        ):
            assert self.cache[self._pages(block_id)] == [POISON] * self.block_size, "written under a copy"
            contents = self.host.get(slot) if slot else self.files.get(key)
            if contents is None or place == lost:
                failed.append(place)
                assert place == lost, f"a {'slot' if slot else 'file'} was freed while it was read"
                continue
            self.cache[self._pages(block_id)] = contents
            self.num_loaded += 1
        future.set_result(LoadDone(failed))


class TieredEngine(Engine):
    """An engine with `num_host` blocks in host memory and `num_files` on disk."""

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
        self.waits = waits
        """Whether copies to the device end only when the test finishes them."""
        super().__init__(**limits)
        self.use(TieredWorker)

    def open_tiers(self) -> None:
        self.tiers = KVTiers(
            self.kv,
            self,
            host=TierIndex(self.num_host) if self.num_host else None,
            disk=TierIndex(self.num_files) if self.num_files else None,
            block_bytes=1,
            salted_to_disk=self.salted,
        )

    @property
    def copier(self) -> TieredWorker:
        assert isinstance(self.worker, TieredWorker)
        return self.worker

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        for block_id in load.block_ids:
            block = self.kv.pool.blocks[block_id]
            assert block.num_users == 1 and block.key is None, f"{block} is filled while it is used"
        future = self.copier.begin(load)
        if not self.waits:
            self.copier.finish(-1)
        return future

    def store(self, stores: BlockStores) -> None:
        assert self.device.is_quiet, "a step is in flight"
        self.copier.copy_out(stores)

    def waiting_users(self) -> dict[int, int]:
        users: dict[int, int] = {}
        tiers = self.tiers
        loads = [*tiers._loads.values(), *tiers._stray]
        lists = [*tiers._held.values(), *([*load.shared, *load.blocks] for load in loads)]
        for block in (block for blocks in lists for block in blocks):
            users[block.id] = users.get(block.id, 0) + 1
        copied = [id for load, _ in self.copier.loads for id in load.block_ids]
        assert len(copied) == len({*copied}), "a block is filled by two copies"
        for id in copied:
            assert users[id] == 1 and self.kv.pool.blocks[id].key is None, "a block under copy is shared"
        return users

    def finish_all(self) -> None:
        while self.copier.loads:
            self.copier.finish(0)

    def check_tiers(self) -> None:
        """Check that nothing is pinned or on its way, and that each entry has its contents."""
        assert not self.tiers._held and not self.tiers._loads and not self.tiers._stray
        assert not self.tiers._tried and not self.tiers._unwritten
        for tier in (self.tiers.host, self.tiers.disk):
            if tier is not None:
                assert not tier.num_pinned and not tier.num_coming and len(tier) <= tier.capacity
                slots = [*tier._slots.values(), *tier._unused]
                assert len(slots) == len({*slots}) == tier._num_numbered, "slots leaked"
        if self.tiers.disk is not None:
            assert {*self.tiers.disk._slots} == {*self.copier.files}, "files leaked"
            assert len(self.copier.files) <= self.num_files
