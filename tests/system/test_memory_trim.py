"""Tests of returning freed memory to the system."""

import ctypes

import pytest

from quire.system import memory_trim
from quire.system.memory_trim import MemoryTrimmer, trim_memory


def test_heap_is_trimmed_when_much_was_freed_since_the_last_time() -> None:
    """The allocator reports returned memory as free: it must not be trimmed again and again."""
    free, trims = 0, list[int]()
    trimmer = MemoryTrimmer(100, num_free_bytes=lambda: free, trim=lambda: trims.append(free))
    for free in (100, 101, 101, 180, 202, 150, 210, 251, 251):  # noqa: B007 - read by the lambda
        trimmer.look()
    assert trims == [101, 202, 251]


def test_memory_of_a_burst_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks that live on between large ones keep a heap from shrinking by itself."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the allocator is not glibc's")
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    started: list[MemoryTrimmer] = []
    for name in list(memory_trim.os.environ):
        if name.startswith("MALLOC_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(MemoryTrimmer, "start", lambda self: started.append(self))
    trim_memory(1 << 20)
    (trimmer,) = started

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    blocks, kept = [], []
    for _ in range(2000):
        blocks.append(libc.malloc(60_000))
        ctypes.memset(blocks[-1], 1, 60_000)
        kept.append(libc.malloc(64))
    full = resident()
    for block in blocks:
        libc.free(block)
    trimmer.look()
    assert resident() < full - 80_000_000
    for block in kept:
        libc.free(block)


def test_variables_of_the_allocator_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[MemoryTrimmer] = []
    monkeypatch.setattr(MemoryTrimmer, "start", lambda self: started.append(self))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    trim_memory(0)
    assert not started
