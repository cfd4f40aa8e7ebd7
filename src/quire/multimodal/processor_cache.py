"""Larder: what was made of items, for the next prompt that has them."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from quire.data.lru import Lru
from quire.data.multimodal import Arrays, Media, MediaItem, pack, size_of, unpack
from quire.logs import get_logger
from quire.multimodal.processors import ProcessedItem
from quire.system.shared_arena import SharedArena, SharedObject

log = get_logger(__name__)
_ID_BYTES = 8
"""What a token takes in a list."""


class _Kept(NamedTuple):
    """An item, and where its arrays are, if they are in shared memory."""

    key: bytes
    processed: ProcessedItem
    parcel: SharedObject | None = None


class ProcessorCache:
    """Processed items by key, of one API process. With a far side the arrays are there: the core keeps what
    it is sent in the same order, and what it has is not sent again. With an arena they are in shared memory,
    and none is sent."""

    def __init__(self, max_bytes: int, *, far: bool = False, arena: SharedArena | None = None) -> None:
        self._kept: Lru[_Kept] = Lru(max_bytes, self._on_drop)
        """By what it is looked up by: its key, but for items with a uuid."""
        self._arena = arena
        self._is_shared = True
        """Whether the core reads the arena."""
        self._far: Lru[None] | None = Lru(max_bytes) if far else None
        """What the core has."""
        self.count: Callable[[int, int], None] = lambda queries, hits: None
        """Told of items that were asked for, and of those that were there."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_open(self) -> bool:
        """Whether anything is kept at all."""
        return self._kept.max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def find(self, name: bytes) -> tuple[bytes, ProcessedItem] | None:
        """The key of an item and what was made of it: without arrays, if those are on the far side."""
        found = self._kept.get(name) if self.is_open else None
        if found is not None and self._far is not None and found.key not in self._far:
            found = None
        processed = None if found is None else self._at_hand(found)
        if self.is_open:
            self.count(1, processed is not None)
        return None if found is None or processed is None else (found.key, processed)

    def keep(self, name: bytes, key: bytes, processed: ProcessedItem) -> ProcessedItem:
        """As it is used from now on."""
        num_bytes = size_of(processed.arrays or {}) + _ID_BYTES * len(processed.token_ids)
        kept = _Kept(key, processed if self._far is None else replace(processed, arrays=None))
        if self._arena is not None:
            parcel = self._stored(self._arena, processed.arrays or {})
            if parcel is None:
                return processed
            kept = _Kept(key, replace(processed, arrays=None), parcel)
            processed = self._at_hand(kept) or processed
        if not self._kept.put(name, kept, num_bytes):
            self._on_drop(kept)
            if self.is_open:
                _warn(num_bytes, "mm_processor_cache_gb", self._kept.max_bytes)
        return processed

    # ---- shared memory

    def _stored(self, arena: SharedArena, arrays: Arrays) -> SharedObject | None:
        """In the place of as many that nobody needs now as it takes, oldest first. None: it cannot be."""
        if (size := size_of(arrays)) > arena.max_parcel_bytes:
            _warn(size, "mm_shm_cache_max_object_size_mb", arena.max_parcel_bytes)
            return None
        data = pack(arrays)
        if (parcel := arena.put(data)) is not None:
            return parcel
        for name, kept in self._kept.oldest():
            if kept.parcel is not None and arena.is_idle(kept.parcel):
                self._kept.drop(name)
                if (parcel := arena.put(data)) is not None:
                    return parcel
        return None

    def _at_hand(self, kept: _Kept) -> ProcessedItem | None:
        """None: another has just taken its place."""
        if self._arena is None or kept.parcel is None:
            return kept.processed
        stored = self._arena.share(kept.parcel)
        return None if stored is None else replace(kept.processed, stored=stored)

    def _on_drop(self, kept: _Kept) -> None:
        if self._arena is not None and kept.parcel is not None:
            self._arena.drop(kept.parcel)

    def clear(self) -> None:
        self._kept.clear()
        self.forget_far()

    # ---- the far side

    def forget_far(self) -> None:
        """It may have nothing any more. What it still has is older than all that it is sent from now on, so
        that it goes first there, and never too early."""
        if self._far is not None:
            self._far.clear()

    def lose_far(self) -> None:
        """It is dead; the next one may read what is shared."""
        self.forget_far()
        if self._arena is not None:
            self._arena.lose_far()
            self._is_shared = True

    def lacks(self, media: Media) -> bool:
        """Whether there is an item that neither is here nor there."""
        return any(
            item.arrays is None and item.stored is None and not self._is_far(item.key) for item in media.items
        )

    def _is_far(self, key: bytes) -> bool:
        return self._far is not None and key in self._far

    def outgoing(self, media: Media, *, whole: bool = False) -> Media:
        """As it is sent to the core: without arrays that it has, unless it is to have the `whole`."""
        if self._arena is not None:
            return self._referred(self._arena, media, whole)
        if self._far is None:
            return media
        brought: dict[bytes, Arrays] = {}
        sent: list[MediaItem] = []
        for item in media.items:
            arrays = item.arrays
            if item.key in brought:
                arrays = None
            elif arrays is not None and (whole or item.key not in self._far):
                brought[item.key] = arrays
            else:
                assert item.key in self._far, "an item that nobody has"
                self._far.get(item.key)
                arrays = None
            sent.append(msgspec.structs.replace(item, arrays=arrays))
        for key, arrays in brought.items():
            self._far.put(key, None, size_of(arrays))
        return msgspec.structs.replace(media, items=sent)

    def _referred(self, arena: SharedArena, media: Media, whole: bool) -> Media:
        """To shared memory, unless the core cannot read it: a second time nobody tries."""
        if whole and self._is_shared:
            log.warning("The engine cannot open the shared memory of media: they are sent to it")
            self._is_shared = False
        sent: list[MediaItem] = []
        for item in media.items:
            if item.stored is not None and self._is_shared:
                arena.send(item.stored)
            elif item.stored is not None:
                arrays = unpack(arena.read(item.stored))
                item = msgspec.structs.replace(item, arrays=arrays, stored=None)
            sent.append(item)
        return msgspec.structs.replace(media, items=sent)


def _warn(num_bytes: int, setting: str, limit: int) -> None:
    log.warning(
        "An item of %.1f MiB is larger than %s (%.1f MiB), and is not kept",
        num_bytes / 2**20,
        setting,
        limit / 2**20,
    )
