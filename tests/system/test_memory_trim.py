"""Tests of returning freed memory to the system."""

import ctypes
import os

import pytest

from quire.system.memory_trim import MemoryTrimmer, trim_memory


def test_heap_is_trimmed_when_more_is_unused_than_after_the_last_time() -> None:
    """Some unused memory cannot be returned: the heap must not be trimmed for it again and again."""
    unused, trims = 50, list[int]()

    def trim() -> None:
        nonlocal unused
        trims.append(unused)
        unused = 80

    trimmer = MemoryTrimmer(100, num_unused_bytes=lambda: unused, trim=trim)
    for unused in (150, 151, 80, 180, 181, 10, 110, 111):  # noqa: B007 - read by the lambda
        trimmer.look()
    assert trims == [151, 181, 111]


def test_memory_of_a_burst_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks that live on between large ones keep a heap from shrinking by itself."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the allocator is not glibc's")
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    started: list[MemoryTrimmer] = []
    for name in list(os.environ):
        if name.startswith("MALLOC_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(MemoryTrimmer, "start", lambda self: started.append(self))
    trim_memory(1 << 20)
    (trimmer,) = started

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    blocks, kept = list[int](), list[int]()

    def burst() -> None:
        for _ in range(2000):
            blocks.append(libc.malloc(60_000))
            ctypes.memset(blocks[-1], 1, 60_000)
            kept.append(libc.malloc(64))
        full = resident()
        trimmer.look()  # nothing can be returned now
        while blocks:
            libc.free(blocks.pop())
        trimmer.look()
        assert resident() < full - 80_000_000

    for _ in range(2):  # the second one uses what the first has returned
        burst()
    for block in kept:
        libc.free(block)


def test_variables_of_the_allocator_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[MemoryTrimmer] = []
    monkeypatch.setattr(MemoryTrimmer, "start", lambda self: started.append(self))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    trim_memory(0)
    assert not started
