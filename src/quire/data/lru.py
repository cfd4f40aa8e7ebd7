"""Lru: values by key, as many as fit into so many bytes."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class Lru(Generic[V]):
    """The value that nobody asked for the longest goes first. Two of them that are told the same in the same
    order keep the same keys."""

    def __init__(self, max_bytes: int, on_drop: Callable[[V], None] = lambda value: None) -> None:
        """`on_drop` is told of each value that is not kept any more."""
        self.max_bytes = max_bytes
        self._on_drop = on_drop
        self.num_bytes = 0
        self._kept: dict[bytes, tuple[V, int]] = {}
        """Oldest first."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        """Asking so does not make it newer."""
        return key in self._kept

    def get(self, key: bytes) -> V | None:
        with self._lock:
            if (found := self._kept.pop(key, None)) is None:
                return None
            self._kept[key] = found
            return found[0]

    def put(self, key: bytes, value: V, num_bytes: int) -> bool:
        """False: it alone is larger than all may be, and is not kept."""
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
        if (found := self._kept.pop(key, None)) is not None:
            self.num_bytes -= found[1]
            self._on_drop(found[0])

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def oldest(self) -> list[tuple[bytes, V]]:
        """All of them, oldest first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._kept.items()]

    def clear(self) -> None:
        with self._lock:
            for key in list(self._kept):
                self._drop(key)
