"""Lru: a cache of values by key, limited in bytes."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class Lru(Generic[V]):
    """A cache that evicts the least recently used values when all values together exceed `max_bytes`. Two
    caches with the same calls in the same order have the same keys."""

    def __init__(self, max_bytes: int, on_drop: Callable[[V], None] = lambda value: None) -> None:
        """Create an empty cache. `on_drop` is called for each value that is evicted, replaced or removed."""
        self.max_bytes = max_bytes
        self._on_drop = on_drop
        self.num_bytes = 0
        self._kept: dict[bytes, tuple[V, int]] = {}
        """Values and sizes, the oldest first."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        """Return whether the key is cached, without marking it as used."""
        return key in self._kept

    def get(self, key: bytes) -> V | None:
        with self._lock:
            if (entry := self._kept.pop(key, None)) is None:
                return None
            self._kept[key] = entry
            return entry[0]

    def put(self, key: bytes, value: V, num_bytes: int) -> bool:
        """Store a value; return False if the value is larger than the whole cache."""
        if num_bytes > self.max_bytes:
            return False
        with self._lock:
            self._drop(key)
            while self.num_bytes + num_bytes > self.max_bytes:
                self._drop(next(iter(self._kept)))
            self._kept[key] = value, num_bytes
            self.num_bytes += num_bytes
        return True

    def _drop(self, key: bytes) -> None:
        if (entry := self._kept.pop(key, None)) is not None:
            self.num_bytes -= entry[1]
            self._on_drop(entry[0])

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def oldest(self) -> list[tuple[bytes, V]]:
        """Return all keys and values, the oldest first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._kept.items()]

    def clear(self) -> None:
        with self._lock:
            for key in list(self._kept):
                self._drop(key)
