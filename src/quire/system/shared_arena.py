"""Objects in shared memory: one process writes them, others read them in place.

The memory has no name: other processes open it through /proc of a process that has it open. It is freed when
the last of these processes ends.
"""

import itertools
import mmap
import os
import threading
import weakref
from bisect import insort
from collections import deque
from dataclasses import dataclass

from quire.data.multimodal import StoredArrays
from quire.errors import EngineError

_LINE = 64
"""Alignment of objects in bytes. Each begins with two words of 4 bytes: the number of releases by its
receivers, and its generation."""
_HEAD = 8
"""Bytes of the two words at the start of an object."""
_WRAP = 1 << 32


@dataclass(slots=True, eq=False)
class SharedObject:
    """The owner's record of an object in the shared memory: its place, size and references."""

    start: int
    size: int
    """Bytes of the object with header and padding."""
    length: int
    """Bytes of the data."""
    generation: int
    num_users: int = 0
    """Number of references to the object in this process."""
    num_sent: int = 0
    """Number of times the object was sent to the other process."""


class SharedArena:
    """The shared memory on the side of its owner, which allocates it.

    An object may be overwritten once it was dropped, no reference (`StoredArrays`) to it exists in this
    process, and the other process has released every reference that it received. Releases are counted in the
    header of the object.
    """

    def __init__(self, num_bytes: int, max_object_bytes: int) -> None:
        num_bytes = max(num_bytes // _LINE, 1) * _LINE
        self.max_object_bytes = min(max_object_bytes, num_bytes)
        fd = os.memfd_create("quire-media")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._memory = memoryview(mmap.mmap(fd, num_bytes))
        self._words = self._memory.cast("I")
        self._free = [(0, num_bytes)]
        """Start and size of free pieces in bytes, sorted; adjacent pieces are joined."""
        self._objects: dict[int, SharedObject] = {}
        self._dropped: dict[int, SharedObject] = {}
        """Dropped objects whose memory is not free yet, since references to them exist."""
        self._ended: deque[int] = deque()
        """Byte offsets of objects that lost a reference in this process; appended by any thread."""
        self._generations = itertools.count()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all stored objects."""
        return sum(item.size for item in self._objects.values())

    @property
    def num_busy(self) -> int:
        """Return the number of objects that must not be overwritten now."""
        with self._lock:
            self._settle()
            return sum(not self._is_idle(item) for item in self._objects.values())

    def put(self, data: bytes) -> SharedObject | None:
        """Write an object and return its record; return None if it is too large, or if no free piece has
        its size."""
        size = -(-(_HEAD + len(data)) // _LINE) * _LINE
        if size > self.max_object_bytes:
            return None
        with self._lock:
            self._settle()
            start = self._allocate(size)
            if start is None:
                return None
            item = SharedObject(start, size, len(data), next(self._generations) % _WRAP)
            self._objects[start] = item
            self._words[start // 4], self._words[start // 4 + 1] = 0, item.generation
        self._memory[start + _HEAD : start + _HEAD + len(data)] = data
        return item

    def share(self, item: SharedObject) -> StoredArrays | None:
        """Return a reference that keeps the object in place while it exists; None if the object is gone."""
        with self._lock:
            if self._objects.get(item.start) is not item:
                return None
            item.num_users += 1
        stored = StoredArrays(self.path, item.start, item.length, item.generation)
        weakref.finalize(stored, self._ended.append, item.start).atexit = False
        return stored

    def send(self, stored: StoredArrays) -> None:
        """Record that the object is sent to the other process, which will release it."""
        with self._lock:
            self._objects[stored.start].num_sent += 1

    def read(self, stored: StoredArrays) -> memoryview:
        return _read(self._memory, self._words, stored)

    def is_idle(self, item: SharedObject) -> bool:
        """Whether nothing refers to the object, so that its memory would be reused if it were dropped."""
        with self._lock:
            self._settle()
            return self._is_idle(item)

    def drop(self, item: SharedObject) -> None:
        """Mark an object as no longer needed. Its memory is reused once no process has a reference to it."""
        with self._lock:
            self._dropped[item.start] = item
            self._settle()

    def reset_receiver(self) -> None:
        """Count all objects as released by the other process, which has died."""
        with self._lock:
            for item in self._objects.values():
                item.num_sent = self._words[item.start // 4]

    # ---- with the lock

    def _settle(self) -> None:
        while self._ended:
            self._objects[self._ended.popleft()].num_users -= 1
        for item in [item for item in self._dropped.values() if self._is_idle(item)]:
            del self._dropped[item.start], self._objects[item.start]
            self._free_piece(item.start, item.size)

    def _is_idle(self, item: SharedObject) -> bool:
        return not item.num_users and self._words[item.start // 4] == item.num_sent % _WRAP

    def _allocate(self, size: int) -> int | None:
        """Return the start in bytes of a piece taken from the first free piece of at least `size` bytes;
        None if there is none."""
        for place, (start, free) in enumerate(self._free):
            if free >= size:
                self._free[place : place + 1] = [(start + size, free - size)] if free > size else []
                return start
        return None

    def _free_piece(self, start: int, size: int) -> None:
        insort(self._free, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, length in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((begin, length))
        self._free = joined


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of another process, mapped into this process."""

    fd: int
    words: memoryview
    num_taken: int = 0


class ArenaReader:
    """The receiving process's side: it keeps an object until this process has no reference to it, and then
    releases it to the owner.

    Objects are released when the requests and step plans that refer to them end, however they end.
    """

    def __init__(self) -> None:
        self._memories: dict[tuple[int, int], _Memory] = {}
        """Mapped memories by device and inode, the newest last. A restarted owner creates a new memory."""
        self._ended: deque[tuple[tuple[int, int], int]] = deque()

    def take(self, stored: StoredArrays) -> bool:
        """Let a received reference use this process's descriptor of the memory. Return False if the memory
        cannot be opened."""
        try:
            key = _key(stored.memory)
            memory = self._memories.get(key) or self._open(stored.memory, key)
        except OSError:
            return False
        stored.memory = f"/proc/{os.getpid()}/fd/{memory.fd}"
        memory.num_taken += 1
        weakref.finalize(stored, self._ended.append, (key, stored.start)).atexit = False
        return True

    def _open(self, path: str, key: tuple[int, int]) -> _Memory:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memories[key] = _Memory(fd, memoryview(mmap.mmap(fd, 0)).cast("I"))
        return self._memories[key]

    def settle(self) -> None:
        """Release the objects that have no references any more."""
        while self._ended:
            key, start = self._ended.popleft()
            memory = self._memories[key]
            memory.words[start // 4] = (memory.words[start // 4] + 1) % _WRAP
            memory.num_taken -= 1
        for key in list(self._memories)[:-1]:
            if not self._memories[key].num_taken:
                os.close(self._memories.pop(key).fd)


class ArenaView:
    """Reads objects of a `SharedArena` in place, without releasing them; maps one memory at a time."""

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._memory = self._words = memoryview(b"")

    def read(self, stored: StoredArrays) -> memoryview:
        """Return the object in place. The sender of `stored` keeps it there until the step is over."""
        try:
            if (key := _key(stored.memory)) != self._key:
                self._open(stored.memory)
                self._key = key
        except OSError as error:
            raise EngineError(f"the shared memory of multimodal items cannot be opened: {error}") from None
        return _read(self._memory, self._words, stored)

    def _open(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
        self._words = self._memory.cast("I")


def _key(path: str) -> tuple[int, int]:
    """Return what identifies a memory: device and inode, since descriptor numbers are reused."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _read(memory: memoryview, words: memoryview, stored: StoredArrays) -> memoryview:
    if words[stored.start // 4 + 1] != stored.generation:
        raise EngineError("the shared memory of an item was overwritten")
    first = stored.start + _HEAD
    return memory[first : first + stored.length]
