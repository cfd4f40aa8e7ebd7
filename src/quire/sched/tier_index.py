"""TierIndex: the entries of one lower tier of the KV cache."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.data.kv_tiers import ON_DISK, REMOTE
from quire.sched.blocks import Block, BlockPool

IN_LOWER_TIER = Block(-1)
"""Placeholder, in a prefix cache `Hit`, for a block that only a lower tier or another engine holds."""


class TierIndex:
    """Entries in host memory or on disk by key, in the order of their last use, each in a numbered slot.

    `allot` reserves a slot for an entry that is to be copied, and `commit` makes the copied entry available.
    An entry is pinned while it is read; pinned entries are not evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        self._being_copied: dict[bytes, int] = {}
        """Slots of blocks that are being copied into the tier."""
        self._free_slots: list[int] = []
        self._num_numbered = 0
        self.on_stored: Callable[[bytes], None] = lambda key: None
        """Called with the key of a block that the tier now holds."""
        self.on_removed: Callable[[bytes], None] = lambda key: None
        """Called with the key of a block that the tier no longer holds."""
        self.on_evicted: Callable[[bytes], None] = lambda key: None
        """Called with the key of a block that makes way for another one."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def __contains__(self, key: bytes) -> bool:
        """Whether the tier holds the block, or a copy into the tier is under way."""
        return key in self._slots or key in self._being_copied

    def find(self, key: bytes) -> int | None:
        """Return the slot of a block, counted from 1; None: the tier does not hold the block."""
        return self._slots.get(key)

    def allot(self, key: bytes) -> tuple[int, bytes | None] | None:
        """Return a slot for a new block and the key of the entry that it replaces, if any. Return None if all
        slots are pinned or being filled."""
        assert key not in self, "the block is already in this tier"
        evicted = None
        if self._free_slots:
            slot = self._free_slots.pop()
        elif self._num_numbered < self.capacity:
            self._num_numbered += 1
            slot = self._num_numbered
        else:
            evicted = next((old for old in self._slots if old not in self._pins), None)
            if evicted is None:
                return None
            slot = self._slots.pop(evicted)
            self.on_removed(evicted)
            self.on_evicted(evicted)
        self._being_copied[key] = slot
        return slot, evicted

    def commit(self, key: bytes) -> None:
        """Make a block available that has been copied into its slot."""
        self._slots[key] = self._being_copied.pop(key)
        self.on_stored(key)

    def cancel(self, key: bytes) -> None:
        """Free the slot of a block that was not copied after all."""
        self._free_slots.append(self._being_copied.pop(key))

    def touch(self, key: bytes) -> None:
        """Make an entry the last to be evicted."""
        if key in self._slots:
            self._slots.move_to_end(key)

    def pin(self, key: bytes) -> None:
        self._pins[key] += 1
        self.touch(key)

    def unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def remove(self, key: bytes) -> bool:
        """Remove an entry, unless it is pinned; return whether it was removed."""
        if key in self._pins or (slot := self._slots.pop(key, None)) is None:
            return False
        self._free_slots.append(slot)
        self.on_removed(key)
        return True

    def clear(self) -> list[bytes]:
        """Remove all entries that are not pinned, and return their keys."""
        return [key for key in list(self._slots) if self.remove(key)]

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_being_copied(self) -> int:
        return len(self._being_copied)


@dataclass(slots=True)
class EntryTiers:
    """The lower tiers of one kind of entries: KV blocks, or checkpoints of SSM states."""

    pool: BlockPool
    """Pool of the entries of this kind on the device."""
    entry_bytes: int
    """Bytes of an entry on all workers."""
    host: TierIndex | None = None
    disk: TierIndex | None = None

    def __iter__(self) -> Iterator[TierIndex]:
        return (tier for tier in (self.host, self.disk) if tier is not None)

    def holds(self, key: bytes) -> bool:
        """Whether one of the tiers has the entry with this key, so that it can be loaded."""
        return any(tier.find(key) for tier in self)

    def slot(self, key: bytes) -> int:
        """Return the host memory slot of an entry, ON_DISK if only the disk tier has it, or REMOTE if neither
        has it."""
        if self.host is not None and (slot := self.host.find(key)):
            return slot
        return ON_DISK if self.disk is not None and self.disk.find(key) else REMOTE

    def source(self, slot: int) -> TierIndex | None:
        """Return the local tier that an entry with this slot is loaded from; None: another engine has it."""
        return None if slot == REMOTE else self.host if slot else self.disk
