"""Objects in shared memory: one process puts them there, others read them where they lie.

The memory has no name, as that of rings has none: others open it through a process that has it, and it goes
with the last of them, however they end.
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
"""Objects begin at multiples of it, each with two words of 4 bytes: how often those who were sent it have let
go of it, and its generation."""
_HEAD = 8
_WRAP = 1 << 32


@dataclass(slots=True, eq=False)
class SharedObject:
    """An object, as the owner of the memory knows it."""

    start: int
    size: int
    """Bytes that it takes, and"""
    length: int
    """those of what it is."""
    generation: int
    num_users: int = 0
    """Here, and"""
    num_sent: int = 0
    """times that it was sent elsewhere."""


class SharedArena:
    """The memory in the hands of its owner, who says what lies where.

    An object is overwritten when it was dropped, no `StoredArrays` of it exists here, and the far side has
    released all that were sent there. The far side counts releases in the object itself.
    """

    def __init__(self, num_bytes: int, max_parcel_bytes: int) -> None:
        num_bytes = max(num_bytes // _LINE, 1) * _LINE
        self.max_parcel_bytes = min(max_parcel_bytes, num_bytes)
        fd = os.memfd_create("quire-media")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._memory = memoryview(mmap.mmap(fd, num_bytes))
        self._words = self._memory.cast("I")
        self._free = [(0, num_bytes)]
        """Start and size of what nobody has, in order; never two side by side."""
        self._parcels: dict[int, SharedObject] = {}
        self._dropped: dict[int, SharedObject] = {}
        """Those of them that wait to be overwritten."""
        self._ended: deque[int] = deque()
        """Starts of those that somebody here had; told by whatever thread it ended in."""
        self._generations = itertools.count()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """That are taken."""
        return sum(parcel.size for parcel in self._parcels.values())

    @property
    def num_busy(self) -> int:
        """Parcels that must not be overwritten now."""
        with self._lock:
            self._settle()
            return sum(not self._is_idle(parcel) for parcel in self._parcels.values())

    def put(self, data: bytes) -> SharedObject | None:
        """None: there is no room in one piece, or it is too large."""
        size = -(-(_HEAD + len(data)) // _LINE) * _LINE
        if size > self.max_parcel_bytes:
            return None
        with self._lock:
            self._settle()
            start = self._take(size)
            if start is None:
                return None
            parcel = SharedObject(start, size, len(data), next(self._generations) % _WRAP)
            self._parcels[start] = parcel
            self._words[start // 4], self._words[start // 4 + 1] = 0, parcel.generation
        self._memory[start + _HEAD : start + _HEAD + len(data)] = data
        return parcel

    def share(self, parcel: SharedObject) -> StoredArrays | None:
        """It stays as long as anybody has what this returns. None: it is gone already."""
        with self._lock:
            if self._parcels.get(parcel.start) is not parcel:
                return None
            parcel.num_users += 1
        stored = StoredArrays(self.path, parcel.start, parcel.length, parcel.generation)
        weakref.finalize(stored, self._ended.append, parcel.start).atexit = False
        return stored

    def send(self, stored: StoredArrays) -> None:
        """The far side is given it, and will let go of it."""
        with self._lock:
            self._parcels[stored.start].num_sent += 1

    def read(self, stored: StoredArrays) -> memoryview:
        return _read(self._memory, self._words, stored)

    def is_idle(self, parcel: SharedObject) -> bool:
        """Whether it would be overwritten if it were dropped."""
        with self._lock:
            self._settle()
            return self._is_idle(parcel)

    def drop(self, parcel: SharedObject) -> None:
        """It is not asked for again."""
        with self._lock:
            self._dropped[parcel.start] = parcel
            self._settle()

    def lose_far(self) -> None:
        """The far side is dead, and has nothing any more."""
        with self._lock:
            for parcel in self._parcels.values():
                parcel.num_sent = self._words[parcel.start // 4]

    # ---- with the lock

    def _settle(self) -> None:
        while self._ended:
            self._parcels[self._ended.popleft()].num_users -= 1
        for parcel in [each for each in self._dropped.values() if self._is_idle(each)]:
            del self._dropped[parcel.start], self._parcels[parcel.start]
            self._give(parcel.start, parcel.size)

    def _is_idle(self, parcel: SharedObject) -> bool:
        return not parcel.num_users and self._words[parcel.start // 4] == parcel.num_sent % _WRAP

    def _take(self, size: int) -> int | None:
        """From the first piece that is large enough."""
        for place, (start, free) in enumerate(self._free):
            if free >= size:
                self._free[place : place + 1] = [(start + size, free - size)] if free > size else []
                return start
        return None

    def _give(self, start: int, size: int) -> None:
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
    """That of somebody else."""

    fd: int
    words: memoryview
    num_taken: int = 0


class ArenaReader:
    """The far side: has what it is sent until nobody in this process refers to it, then says so.

    Nobody has to remember to give anything back: requests and plans that end, however they do, refer to
    nothing.
    """

    def __init__(self) -> None:
        self._memories: dict[tuple[int, int], _Memory] = {}
        """The newest last. An owner that is started again has another."""
        self._ended: deque[tuple[tuple[int, int], int]] = deque()

    def take(self, stored: StoredArrays) -> bool:
        """Refer readers to this process's own way to the memory. False: there is none."""
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
        """Tell owners of what nobody has any more."""
        while self._ended:
            key, start = self._ended.popleft()
            memory = self._memories[key]
            memory.words[start // 4] = (memory.words[start // 4] + 1) % _WRAP
            memory.num_taken -= 1
        for key in list(self._memories)[:-1]:
            if not self._memories[key].num_taken:
                os.close(self._memories.pop(key).fd)


class ArenaView:
    """The memory as readers see it: one at a time."""

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._memory = self._words = memoryview(b"")

    def read(self, stored: StoredArrays) -> memoryview:
        """Where it lies. Who has sent the `stored` keeps it there until the step is over."""
        try:
            if (key := _key(stored.memory)) != self._key:
                self._open(stored.memory)
                self._key = key
        except OSError as error:
            raise EngineError(f"the shared memory of media cannot be opened: {error}") from None
        return _read(self._memory, self._words, stored)

    def _open(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
        self._words = self._memory.cast("I")


def _key(path: str) -> tuple[int, int]:
    """Which memory it is: the number of a descriptor may be that of another by now."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _read(memory: memoryview, words: memoryview, stored: StoredArrays) -> memoryview:
    if words[stored.start // 4 + 1] != stored.generation:
        raise EngineError("something else lies where the arrays of an item were")
    first = stored.start + _HEAD
    return memory[first : first + stored.length]
