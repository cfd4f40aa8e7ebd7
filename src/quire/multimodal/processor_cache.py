"""Cache of processed images, videos and audio, for later prompts with the same items."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from quire.data.lru import Lru
from quire.data.multimodal import Arrays, Media, MediaItem, pack, size_of, unpack
from quire.logs import get_logger
from quire.multimodal.processors import ProcessedItem
from quire.system.shared_arena import SharedArena, SharedObject
from quire.system.shared_cache import SharedCache

log = get_logger(__name__)
_ID_BYTES = 8
"""Estimated bytes of a token id in a Python list."""


class _CacheEntry(NamedTuple):
    """A cached item with its cache key, and the location of its arrays if they are in shared memory."""

    key: bytes
    processed: ProcessedItem
    shared: SharedObject | None = None


class ProcessorCache:
    """Cache of the processed items of one API process.

    If `replicated`, the engine core caches the arrays; this cache evicts items in the same order, so that it
    knows which arrays the core has, and does not send them again. With an `arena`, the arrays are in shared
    memory, and only references to them are sent."""

    def __init__(self, max_bytes: int, *, replicated: bool = False, arena: SharedArena | None = None) -> None:
        self._entries: Lru[_CacheEntry] = Lru(max_bytes, self._on_drop)
        """Cached items by name. The name is the cache key, or a hash of the uuid for items with a uuid."""
        self._arena = arena
        self._is_shared = True
        """Whether the engine core can read the shared memory of the arena; if not, arrays are sent to it."""
        self._core_keys: Lru[None] | None = Lru(max_bytes) if replicated else None
        """Cache keys of the items whose arrays the engine core has; None if not `replicated`."""
        self.count: Callable[[int, int], None] = lambda queries, hits: None
        """Metrics function, called with the number of lookups and the number of hits."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_open(self) -> bool:
        return self._entries.max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._entries.num_bytes

    def find(self, name: bytes) -> tuple[bytes, ProcessedItem] | None:
        """Return the cache key and the processed item of a name, or None if it is not cached. The item has no
        arrays if the engine core has them."""
        entry = self._entries.get(name) if self.is_open else None
        if entry is not None and self._core_keys is not None and entry.key not in self._core_keys:
            entry = None
        processed = None if entry is None else self._with_place(entry)
        if self.is_open:
            self.count(1, processed is not None)
        return None if entry is None or processed is None else (entry.key, processed)

    def put(self, name: bytes, key: bytes, processed: ProcessedItem) -> ProcessedItem:
        """Store a processed item. Return the item to use from now on, which may refer to arrays in shared
        memory."""
        num_bytes = size_of(processed.arrays or {}) + _ID_BYTES * len(processed.token_ids)
        entry = _CacheEntry(key, processed if self._core_keys is None else replace(processed, arrays=None))
        if self._arena is not None:
            shared = self._store(self._arena, processed.arrays or {})
            if shared is None:
                return processed
            entry = _CacheEntry(key, replace(processed, arrays=None), shared)
            processed = self._with_place(entry) or processed
        if not self._entries.put(name, entry, num_bytes):
            self._on_drop(entry)
            if self.is_open:
                _warn(num_bytes, "mm_processor_cache_gb", self._entries.max_bytes)
        return processed

    # ---- shared memory

    def _store(self, arena: SharedArena, arrays: Arrays) -> SharedObject | None:
        """Store arrays in shared memory, and return their location. Evict the oldest unused items if there is
        no space; return None if there still is none."""
        if (size := size_of(arrays)) > arena.max_object_bytes:
            _warn(size, "mm_shm_cache_max_object_size_mb", arena.max_object_bytes)
            return None
        data = pack(arrays)
        if (shared := arena.put(data)) is not None:
            return shared
        for name, entry in self._entries.oldest():
            if entry.shared is not None and arena.is_idle(entry.shared):
                self._entries.drop(name)
                if (shared := arena.put(data)) is not None:
                    return shared
        return None

    def _with_place(self, entry: _CacheEntry) -> ProcessedItem | None:
        """Return the item of an entry, with a reference to its arrays if they are in shared memory. Return
        None if that memory was just overwritten."""
        if self._arena is None or entry.shared is None:
            return entry.processed
        stored = self._arena.share(entry.shared)
        return None if stored is None else replace(entry.processed, stored=stored)

    def _on_drop(self, entry: _CacheEntry) -> None:
        if self._arena is not None and entry.shared is not None:
            self._arena.drop(entry.shared)

    def clear(self) -> None:
        self._entries.clear()
        self.clear_core_keys()

    # ---- the engine core's copy

    def clear_core_keys(self) -> None:
        """Forget which arrays the engine core has, so that all arrays are sent again. The core evicts its
        earlier arrays before any that are sent later."""
        if self._core_keys is not None:
            self._core_keys.clear()

    def reset_core(self) -> None:
        """Forget the state of a dead engine core. The next core may be able to read the shared memory."""
        self.clear_core_keys()
        if self._arena is not None:
            self._arena.reset_receiver()
            self._is_shared = True

    def lacks(self, media: Media) -> bool:
        """Return whether the arrays of any item are neither in the item, in shared memory nor in the engine
        core."""
        core_keys = self._core_keys or ()
        return any(
            item.arrays is None and item.stored is None and item.key not in core_keys for item in media.items
        )

    def outgoing(self, media: Media, *, all_arrays: bool = False) -> Media:
        """Return the media to send to the engine core. Arrays that the core already has are left out unless
        `all_arrays`."""
        if self._arena is not None:
            return self._refer_to_arena(self._arena, media, all_arrays)
        if self._core_keys is None:
            return media
        new_arrays: dict[bytes, Arrays] = {}
        sent: list[MediaItem] = []
        for item in media.items:
            arrays = item.arrays
            if item.key in new_arrays:
                arrays = None
            elif arrays is not None and (all_arrays or item.key not in self._core_keys):
                new_arrays[item.key] = arrays
            else:
                assert item.key in self._core_keys, "an item without arrays"
                self._core_keys.get(item.key)
                arrays = None
            sent.append(msgspec.structs.replace(item, arrays=arrays))
        for key, arrays in new_arrays.items():
            self._core_keys.put(key, None, size_of(arrays))
        return msgspec.structs.replace(media, items=sent)

    def _refer_to_arena(self, arena: SharedArena, media: Media, all_arrays: bool) -> Media:
        """Return the media with references to shared memory in place of arrays. If the engine core cannot
        read that memory, which it reports with `all_arrays`, the arrays are included."""
        if all_arrays and self._is_shared:
            log.warning(
                "The engine core cannot open the shared memory of media: arrays are sent over the socket. "
                "Check that /dev/shm is large enough and shared by all containers"
            )
            self._is_shared = False
            arena.reset_receiver()  # the core has not taken what was sent, so it never releases it
        sent: list[MediaItem] = []
        for item in media.items:
            if item.stored is not None and self._is_shared:
                arena.send(item.stored)
            elif item.stored is not None:
                arrays = unpack(arena.read(item.stored))
                item = msgspec.structs.replace(item, arrays=arrays, stored=None)
            sent.append(item)
        return msgspec.structs.replace(media, items=sent)


class SharedProcessorCache(ProcessorCache):
    """Cache of processed items, including their arrays, in memory that all API processes of a server
    share."""

    def __init__(self, shared: SharedCache) -> None:
        super().__init__(shared.max_bytes)
        self._shared = shared

    def __len__(self) -> int:
        return len(self._shared)

    @property
    def num_bytes(self) -> int:
        return self._shared.num_bytes

    def find(self, name: bytes) -> tuple[bytes, ProcessedItem] | None:
        value = self._shared.get(name)
        self.count(1, value is not None)
        return None if value is None else _decode(value)

    def put(self, name: bytes, key: bytes, processed: ProcessedItem) -> ProcessedItem:
        value = _encode((key, processed))
        if not self._shared.put(name, value):
            _warn(len(value), "mm_processor_cache_gb", self._shared.max_bytes)
        return processed

    def clear(self) -> None:
        self._shared.clear()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, ProcessedItem]).decode


def _warn(num_bytes: int, setting: str, limit: int) -> None:
    log.warning(
        "An item of %.1f MiB is larger than %s (%.1f MiB) and is not cached",
        num_bytes / 2**20,
        setting,
        limit / 2**20,
    )
