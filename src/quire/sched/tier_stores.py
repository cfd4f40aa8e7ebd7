"""TierStores: copies of KV cache entries from the device to host memory and disk.

An entry is a KV block, or a checkpoint of SSM states. It is copied to host memory when it is evicted from the
device, or shortly before, and to disk as soon as it is full. The copy is part of a step, before it computes:
steps run in order, so the entry is complete and not yet overwritten."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.data.kv_tiers import BlockStores, is_state
from quire.sched.blocks import Block
from quire.sched.kv_manager import is_salted
from quire.sched.tier_index import EntryTiers, TierIndex

AHEAD_SHARE = 1 / 4
"""Fraction of all blocks, those that will be evicted next, that are copied to host memory before their
eviction. If fewer blocks are free, blocks of running requests are copied, too."""
NUM_AHEAD = 64
"""Maximum number of blocks that a step copies before their eviction, in addition to as many as it fills."""

_Stored = tuple[TierIndex, bytes]
"""An entry that a step stores: the tier, and the key of the entry."""


@dataclass(slots=True)
class _InFlight:
    """A planned step: the entries that it fills on the device, and those that it copies to lower tiers."""

    filled: list[tuple[bytes, Block]]
    to_host: list[_Stored]
    to_disk: list[_Stored]
    dropped: list[bytes] = field(default_factory=list)
    """Keys of files that the step deletes."""


class TierStores:
    """Chooses the entries that the next step stores in lower tiers, and records those that steps in flight
    fill and store."""

    def __init__(
        self, pages: EntryTiers | None, states: EntryTiers | None, *, salted_to_disk: bool = False
    ) -> None:
        """Build the stores. `pages` or `states` is None if the model has none of them."""
        self.pages, self.states = pages, states
        self.salted_to_disk = salted_to_disk
        self.disk_is_off = False
        """Whether a worker cannot write to its disk any more."""
        self.planned = 0
        """Number of the last planned step."""
        self.steps: dict[int, _InFlight] = {}
        """Planned steps without a result, by number."""
        self.unwritten: set[bytes] = set()
        """Keys of entries that steps in flight fill."""
        self.evicted: dict[bytes, int] = {}
        """Ids of evicted entries that the next step stores, by key."""
        self.dropped: list[bytes] = []
        """Keys of the disk tier's files to delete."""
        self.num_failed = 0
        """Number of entries that were not stored, because no slot was free."""
        self.sizes: list[int] = []
        """Bytes of each copy to lower tiers since the last report of statistics."""
        self.is_unreported = False
        """Whether something was stored since the workers were last asked for their times."""
        self._full: dict[bytes, Block] = {}
        """Entries that the next step writes to disk, by key."""
        self._ahead: deque[Block] = deque()
        """Free blocks to copy to host memory before they are evicted."""
        self._in_use = deque[Block](maxlen=0 if pages is None else pages.pool.num_usable)
        """Full blocks of running requests, to copy while few blocks are free: otherwise they would be evicted
        as soon as they are free, by a step that waits for their copies."""
        self._next_search = 0
        """Count of allocations (`BlockPool.num_taken`) at which free blocks for `_ahead` are searched
        again."""

    def kind_of(self, key: bytes) -> EntryTiers | None:
        """Return the tiers for the entry with this key; None if the model has no entries of its kind."""
        return self.states if is_state(key) else self.pages

    @property
    def kinds(self) -> list[EntryTiers]:
        return [kind for kind in (self.pages, self.states) if kind is not None]

    @property
    def are_waiting(self) -> bool:
        """Whether something is to be stored or deleted."""
        return bool(self.evicted or self._full or self.dropped)

    def add_files(self, keys: Iterable[bytes]) -> None:
        """Index the files of an earlier run, the least recently used first; those beyond the capacity are
        deleted."""
        for key in keys:
            kind = self.kind_of(key)
            if kind is None or kind.disk is None:
                self.dropped.append(key)
            elif (allotted := kind.disk.allot(key)) is not None:
                kind.disk.commit(key)
                self.dropped += [] if allotted[1] is None else [allotted[1]]

    def note_evicted(self, blocks: list[Block]) -> None:
        for block in blocks:
            assert block.key is not None
            kind = self.kind_of(block.key)
            if block.key not in self.unwritten and kind is not None and any(True for _ in kind):
                self.evicted[block.key] = block.id

    def plan(self, step: int, fresh: Iterable[Block]) -> BlockStores | None:
        """Return the entries that step number `step` copies to lower tiers before it computes; None: no
        entries. `fresh` are the entries on the device that the step fills."""
        self.planned = step
        filled = [(block.key, block) for block in fresh if block.key is not None]
        self.unwritten.update(key for key, _ in filled)
        stores, to_host, to_disk = self._take(NUM_AHEAD + len(filled))
        self.steps[step] = _InFlight(filled, to_host, to_disk, [] if stores is None else stores.dropped)
        return stores

    def take_now(self) -> BlockStores | None:
        """Return the entries to be stored without a step; no step may be in flight."""
        stores, to_host, to_disk = self._take()
        self._commit(_InFlight([], to_host, to_disk))
        return stores

    def _take(self, num_ahead: int = 0) -> tuple[BlockStores | None, list[_Stored], list[_Stored]]:
        """Return what the next step copies to lower tiers and deletes there (None: nothing), and of the
        copied entries those that go to host memory and those that go to disk."""
        evicted, self.evicted = self.evicted, {}
        full, self._full = self._full, {}
        ahead = self._take_ahead(num_ahead)
        kept = {key: block.id for key, block in full.items() if block.key == key} | ahead
        ids = evicted | {key: id for key, id in kept.items() if key not in evicted}
        stores, to_host, to_disk = BlockStores(dropped=self.dropped), list[_Stored](), list[_Stored]()
        self.dropped = []
        num_bytes = 0
        for key, id in ids.items():
            kind = self.kind_of(key)
            assert kind is not None
            slot = self._allot(kind.host, key, to_host) if key in evicted or key in ahead else 0
            is_written = self._goes_to_disk(key) and bool(self._allot(kind.disk, key, to_disk, self.dropped))
            if slot or is_written:
                stores.ids.append(id)
                stores.keys.append(key)
                stores.slots.append(slot)
                stores.to_disk.append(is_written)
                stores.num_ahead += key not in evicted
                num_bytes += kind.entry_bytes
        if not stores.ids and not stores.dropped:
            return None, to_host, to_disk
        self.sizes.append(num_bytes)
        return stores, to_host, to_disk

    def _take_ahead(self, count: int) -> dict[bytes, int]:
        """Return up to `count` blocks that will be evicted soon, so that their eviction needs no copy."""
        ahead = dict[bytes, int]()
        if not count or self.pages is None or (host := self.pages.host) is None:
            return ahead
        pool = self.pages.pool
        if pool.num_taken >= self._next_search:
            num_searched = int(min(pool.num_usable * AHEAD_SHARE, host.capacity / 2))
            self._next_search = pool.num_taken + max(num_searched // 4, 1)
            self._ahead = deque(block for block in pool.next_free(num_searched) if self._is_new(block, host))
        few_are_free = pool.num_free < pool.num_usable * AHEAD_SHARE
        for blocks in (self._ahead, self._in_use) if few_are_free else (self._ahead,):
            for _ in range(min(len(blocks), 4 * count)):
                if len(ahead) == count:
                    break
                block = blocks.popleft()
                if block.key is not None and self._is_new(block, host):
                    ahead[block.key] = block.id
        return ahead

    def _is_new(self, block: Block, host: TierIndex) -> bool:
        """Whether the contents of a block are written, and host memory has no copy of them."""
        return block.key is not None and block.key not in self.unwritten and block.key not in host

    def _goes_to_disk(self, key: bytes) -> bool:
        return not self.disk_is_off and (self.salted_to_disk or not is_salted(key))

    def _allot(
        self, tier: TierIndex | None, key: bytes, stored: list[_Stored], dropped: list[bytes] | None = None
    ) -> int:
        """Return a slot of the tier for an entry, and add it to `stored`; 0: it is there already, or there is
        no room. The key of an entry that it replaces is added to `dropped`."""
        if tier is None:
            return 0
        if key in tier:
            tier.touch(key)
            return 0
        allotted = tier.allot(key)
        if allotted is None:
            self.num_failed += 1
            return 0
        slot, replaced = allotted
        if dropped is not None:
            if key in dropped:
                dropped.remove(key)  # it was replaced a moment ago
            dropped += [] if replaced is None else [replaced]
        stored.append((tier, key))
        return slot

    def finish_step(self, step: int) -> None:
        """Index the entries that a finished step copied to lower tiers, and let the next step write to disk
        the entries that the finished step filled on the device."""
        done = self.steps.pop(step)
        self._commit(done)
        for key, block in done.filled:
            self.unwritten.discard(key)
            kind = self.kind_of(key)
            if kind is None or block.key != key:
                continue
            if kind.disk is not None and key not in kind.disk:
                self._full[key] = block
            if kind is self.pages:
                self._in_use.append(block)

    def _commit(self, step: _InFlight) -> None:
        for tier, key in (*step.to_host, *step.to_disk):
            tier.commit(key)
            self.is_unreported = True

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Remove entries that a worker has not written from the index of the disk tier."""
        for key in keys:
            kind = self.kind_of(key)
            if kind is None or kind.disk is None:
                continue
            stored = (kind.disk, key)
            step = next((step for step in self.steps.values() if stored in step.to_disk), None)
            if step is not None:
                step.to_disk.remove(stored)
                kind.disk.cancel(key)
            if step is not None or kind.disk.remove(key):
                self.dropped.append(key)  # the other workers may have written their part

    def _cancel(self, step: _InFlight) -> None:
        """Free the tier slots of the entries that a step was to copy to lower tiers."""
        for tier, key in (*step.to_host, *step.to_disk):
            tier.cancel(key)

    def forget_steps(self) -> None:
        """Forget the steps in flight, which have failed: their blocks may not have reached the lower tiers,
        nor come from them. Files that they may have written to disk are deleted."""
        for step in self.steps.values():
            self._cancel(step)
            self.dropped += [*step.dropped, *(key for _, key in step.to_disk)]
        self.steps.clear()
        self.unwritten.clear()
        self.evicted.clear()
        self._full.clear()

    def clear(self) -> None:
        """Empty all tiers; steps in flight add nothing to them."""
        for step in self.steps.values():
            self._cancel(step)
            self.dropped += [key for _, key in step.to_disk]
            step.to_host.clear()
            step.to_disk.clear()
        self.evicted.clear()
        self._full.clear()
        for kind in self.kinds:
            for tier in kind:
                removed = tier.clear()
                self.dropped += removed if tier is kind.disk else []
