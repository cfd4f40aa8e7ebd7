"""Shared-memory rings: messages from one writer to many readers, without a copy for each of them.

The memory has no name: it is freed when the last process with its file descriptor ends.
"""

import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
import tempfile
import threading
import time

CAPACITY = 1 << 20
"""Default size of a ring in bytes; a longer message is sent piece by piece, as readers make room."""
SPIN_S = 50e-6
"""Seconds that a reader spins before it sleeps, if there are spare cores."""

_LINE = 64
"""Size of a cache line: counters of different processes are in different lines."""
_HEAD, _SIZE = 0, 1
"""Word indices of the number of written bytes (modulo 2**32) and of the capacity."""
_LENGTH = struct.Struct("<I")
_POLL_S = 50e-6
_WRAP = 1 << 32
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
"""Number of the futex system call."""
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 1 << 30
_fence = threading.Lock()
"""Lock that is taken and released as a memory fence between data and counters."""


def create(num_readers: int, capacity: int = CAPACITY) -> int:
    """Create a ring of `capacity` bytes, a power of two, for this number of readers; return its file
    descriptor."""
    assert capacity & (capacity - 1) == 0
    size = _LINE * (1 + num_readers) + capacity
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quire-ring")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as memory:
        memory[4 * _SIZE : 4 * _SIZE + 4] = capacity.to_bytes(4, "little")
    return fd


class _End:
    """One end of a ring, mapped into this process: byte counters, modulo 2**32, and the bytes themselves."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._memory = mmap.mmap(fd, size)
        view = memoryview(self._memory)
        words = view.cast("I")
        self.capacity = words[_SIZE]
        self._words = words
        self._bytes = view[size - self.capacity :]
        self._address = ctypes.addressof(ctypes.c_uint32.from_buffer(self._memory))

    @property
    def num_readers(self) -> int:
        return (len(self._memory) - self.capacity) // _LINE - 1


class ShmWriter(_End):
    """The writing end of a ring."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._head = self._words[_HEAD]
        self._tails = [(1 + reader) * _LINE // 4 for reader in range(self.num_readers)]

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send a message to all readers; block until all of it is in the ring. Raise TimeoutError if
        readers do not make room within `timeout_s` seconds; the ring is then unusable."""
        rest = memoryview(_LENGTH.pack(len(data)) + data)
        deadline = time.monotonic() + timeout_s
        while rest:
            while not (room := self._room()):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a message of {len(data)} bytes was not read within {timeout_s:g} s")
                time.sleep(_POLL_S)
            part, rest = rest[:room], rest[room:]
            self._put(part)

    def _room(self) -> int:
        behind = max((self._head - self._words[tail]) % _WRAP for tail in self._tails)
        return self.capacity - behind

    def _put(self, part: memoryview) -> None:
        at = self._head % self.capacity
        first = min(len(part), self.capacity - at)
        self._bytes[at : at + first] = part[:first]
        self._bytes[: len(part) - first] = part[first:]
        self._head = (self._head + len(part)) % _WRAP
        with _fence:  # the bytes are written before the counter
            pass
        self._words[_HEAD] = self._head
        _wake(self._address)


class ShmReader(_End):
    """A reading end of a ring; readers are numbered from 0."""

    def __init__(self, fd: int, index: int = 0, spin_s: float = 0.0) -> None:
        super().__init__(fd)
        self._spin_s = spin_s
        self._place = (1 + index) * _LINE // 4
        self._tail = self._words[self._place]
        self._received = bytearray()

    def receive(self, timeout_s: float) -> bytes | None:
        """Wait for the next message and return it; return None if it is not complete within `timeout_s`
        seconds."""
        if (message := self._pop_message()) is not None:
            return message
        deadline = time.monotonic() + timeout_s
        while self._wait(deadline):
            self._read_new()
            if (message := self._pop_message()) is not None:
                return message
        return None

    def _pop_message(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message

    def _wait(self, deadline: float) -> bool:
        """Block until there is new data or `deadline` (time.monotonic seconds) has passed; return whether
        there is new data."""
        words, tail = self._words, self._tail
        if words[_HEAD] != tail:
            return True
        spin_until = time.monotonic() + self._spin_s
        while (now := time.monotonic()) < spin_until:
            if words[_HEAD] != tail:
                return True
        while words[_HEAD] == tail and now < deadline:
            _sleep(self._address, tail, deadline - now)
            now = time.monotonic()
        return words[_HEAD] != tail

    def _read_new(self) -> None:
        head = self._words[_HEAD]
        with _fence:
            pass
        count, at = (head - self._tail) % _WRAP, self._tail % self.capacity
        first = min(count, self.capacity - at)
        self._received += self._bytes[at : at + first]
        self._received += self._bytes[: count - first]
        with _fence:
            pass
        self._tail = self._words[self._place] = head


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True) if _FUTEX is not None else None


def _sleep(address: int, value: int, timeout_s: float) -> None:
    """Sleep on the futex at `address` until it is woken or `timeout_s` seconds have passed; return at once
    if the word there is not `value`."""
    if _libc is None:
        time.sleep(min(_POLL_S, timeout_s))
        return
    seconds = min(timeout_s, 1e6)
    until = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    where, what = ctypes.c_void_p(address), ctypes.c_uint32(value)
    failed = _libc.syscall(_FUTEX, where, _FUTEX_WAIT, what, ctypes.byref(until), None, 0)
    if failed and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        time.sleep(_POLL_S)  # a sandbox may not allow futex


def _wake(address: int) -> None:
    if _libc is not None:
        _libc.syscall(_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, _ALL, None, None, 0)
