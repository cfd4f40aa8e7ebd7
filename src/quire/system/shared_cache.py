"""SharedCache: values by key in memory that several processes share, limited in bytes.

The memory has no name: processes open it through the process that created it, and it is freed when the last
of these processes ends. It is a ring: a value is written behind the newest value, over the oldest values. A
value is entered in the table of keys once it is complete, so that a process that dies while it writes leaves
nothing to read. The lock of a process that dies is released by the operating system.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

_HEAD_BYTES = 64
"""Size of the header. Its first word is the ring position of the next value, which grows with every value and
never wraps."""
_WAYS = 8
"""Number of entries in the table that a key may use."""
_ENTRY_BYTES = 64
"""Size of a table entry: the ring position plus 1 (0: none), the length, and the digest of the key."""
_BYTES_PER_ENTRY = 1 << 15
_MAX_ENTRIES = 1 << 16
_ALIGNMENT = 64
_CHUNK = 1 << 20
"""Bytes that are written under one lock."""


def create_shared_memory(num_bytes: int) -> int:
    """Create the memory of a `SharedCache` for `num_bytes` of values; return its file descriptor."""
    fd = os.memfd_create("quire-media-cache", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(num_bytes, _table_bytes(num_bytes) + _ALIGNMENT))
    return fd


class SharedCache:
    """Access of one process to the values in the shared memory. Any thread may use it."""

    def __init__(self, path: str) -> None:
        """Open the memory at `path`; raise OSError if that is not possible. A lock belongs to an open file
        description, so every process must open the memory itself."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self.max_bytes = os.fstat(self._fd).st_size
        self._mmap = mmap.mmap(self._fd, self.max_bytes)
        self._memory = memoryview(self._mmap)
        table_bytes = _table_bytes(self.max_bytes)
        self._words = self._memory[:table_bytes].cast("Q")
        self._num_sets = (table_bytes - _HEAD_BYTES) // _ENTRY_BYTES // _WAYS
        self._ring = self._memory[table_bytes:]
        self._threads = threading.Lock()

    def get(self, key: bytes) -> bytearray | None:
        """Return a copy of the value of a key; None if it is not there."""
        digest = sha256(key).digest()
        with self._lock(fcntl.LOCK_SH):
            for entry in self._entries(digest):
                position = self._words[entry]
                if position and self._digest(entry) == digest and self._is_kept(position - 1):
                    return self._read(position - 1, self._words[entry + 1])
        return None

    def put(self, key: bytes, value: bytes) -> bool:
        """Store a value; return False if it is larger than the whole cache."""
        size = -(-len(value) // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._ring):
            return False
        with self._lock(fcntl.LOCK_EX):
            position = self._words[0]
            self._words[0] = position + size  # the values to overwrite count as removed
        for offset in range(0, len(value), _CHUNK):
            with self._lock(fcntl.LOCK_EX):  # for a part at a time, since other processes wait
                if not self._is_kept(position):
                    return True
                self._write(position + offset, memoryview(value)[offset : offset + _CHUNK])
        with self._lock(fcntl.LOCK_EX):
            if self._is_kept(position):
                self._enter(sha256(key).digest(), position, len(value))
        return True

    def clear(self) -> None:
        """Remove all values and return their memory to the operating system."""
        with self._lock(fcntl.LOCK_EX):
            self._words[0] += len(self._ring) + _ALIGNMENT
            start = -(-(self.max_bytes - len(self._ring)) // mmap.PAGESIZE) * mmap.PAGESIZE
            if hasattr(mmap, "MADV_REMOVE") and start < self.max_bytes:
                self._mmap.madvise(mmap.MADV_REMOVE, start, self.max_bytes - start)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the ring that are in use, including those of removed values."""
        return min(self._words[0], len(self._ring))

    def __len__(self) -> int:
        """Return the number of values."""
        with self._lock(fcntl.LOCK_SH):
            first, step = _HEAD_BYTES // 8, _ENTRY_BYTES // 8
            positions = [self._words[entry] for entry in range(first, len(self._words), step)]
            return sum(self._is_kept(position - 1) for position in positions if position)

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._fd, kind)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    # ---- with the lock

    def _is_kept(self, position: int) -> bool:
        """Whether the value at this ring position was not overwritten, not even in part."""
        return self._words[0] - position <= len(self._ring)

    def _entries(self, digest: bytes) -> range:
        """Return the indices, in words of the table, of the entries that the key with this digest may use."""
        first = int.from_bytes(digest[:8], "little") % self._num_sets * _WAYS
        step = _ENTRY_BYTES // 8
        start = _HEAD_BYTES // 8 + first * step
        return range(start, start + _WAYS * step, step)

    def _digest(self, entry: int) -> bytes:
        return self._words[entry + 2 : entry + 6].tobytes()

    def _enter(self, digest: bytes, position: int, length: int) -> None:
        """Write the entry of a key, over the entry with the oldest value if the key has none."""
        entries = self._entries(digest)
        same = (entry for entry in entries if self._digest(entry) == digest)
        entry = next(same, None) or min(entries, key=lambda entry: self._words[entry])
        self._words[entry] = 0
        self._words[entry + 1] = length
        self._words[entry + 2 : entry + 6] = memoryview(digest).cast("Q")
        self._words[entry] = position + 1

    def _read(self, position: int, length: int) -> bytearray:
        start = position % len(self._ring)
        value = bytearray(self._ring[start : start + length])
        value += self._ring[: length - len(value)]
        return value

    def _write(self, position: int, value: memoryview) -> None:
        start = position % len(self._ring)
        first = min(len(value), len(self._ring) - start)
        self._ring[start : start + first] = value[:first]
        self._ring[: len(value) - first] = value[first:]


def _table_bytes(num_bytes: int) -> int:
    num_entries = max(min(num_bytes // _BYTES_PER_ENTRY, _MAX_ENTRIES), _WAYS)
    return _HEAD_BYTES + num_entries // _WAYS * _WAYS * _ENTRY_BYTES
