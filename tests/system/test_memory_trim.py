"""Tests of returning freed memory to the system."""

import ctypes
import os

import pytest

from quire.system.memory_trim import MemoryTrimmer, trim_memory


def test_heap_is_trimmed_when_the_process_has_grown_by_free_memory() -> None:
    """The allocator counts returned memory as free, also after a burst that used it again between two looks;
    memory in use cannot be returned."""
    free, resident, trims = 0, 1000, list[int]()

    def trim() -> None:
        nonlocal resident
        trims.append(resident)
        resident = 1010

    trimmer = MemoryTrimmer(100, num_free_bytes=lambda: free, num_resident_bytes=lambda: resident, trim=trim)
    for free, resident in ((90, 1200), (400, 1100), (400, 1101), (400, 1110), (400, 1500), (400, 900)):  # noqa: B007
        trimmer.look()
    assert trims == [1101, 1500]
    free, resident = 400, 1001
    trimmer.look()
    assert trims == [1101, 1500, 1001], "the process had become smaller by itself"


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
