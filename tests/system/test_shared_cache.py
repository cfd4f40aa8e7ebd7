"""Tests of the cache that processes share: limits, order of removal, and processes that die."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.system.shared_cache import SharedCache, create_shared_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
NUM_BYTES = 1 << 16


@pytest.fixture
def path() -> Iterator[str]:
    fd = create_shared_memory(NUM_BYTES)
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def test_value_of_one_process_is_found_by_others(path: str) -> None:
    one, other = SharedCache(path), SharedCache(path)
    assert one.get(b"a") is None and len(one) == 0
    assert one.put(b"a", b"x" * 1000) and other.get(b"a") == b"x" * 1000
    assert other.put(b"a", b"new") and one.get(b"a") == b"new" and len(one) == 1
    assert one.put(b"empty", b"") and other.get(b"empty") == b""
    one.clear()
    assert other.get(b"a") is None and len(other) == 0
    assert other.put(b"a", b"again") and one.get(b"a") == b"again"


def test_memory_is_returned_when_the_cache_is_cleared() -> None:
    fd = create_shared_memory(1 << 22)
    cache = SharedCache(f"/proc/{os.getpid()}/fd/{fd}")
    cache.put(b"a", os.urandom(3 << 20))
    assert os.fstat(fd).st_blocks * 512 >= 3 << 20
    cache.clear()
    assert os.fstat(fd).st_blocks * 512 <= 1 << 16
    os.close(fd)


@given(sizes=st.lists(st.integers(0, 20_000), max_size=60))
def test_newest_values_are_kept_within_the_limit(sizes: list[int]) -> None:
    """Values of any size wrap around the end of the memory; a kept one is never changed by a later one."""
    fd = create_shared_memory(NUM_BYTES)
    cache, ring = SharedCache(f"/proc/{os.getpid()}/fd/{fd}"), NUM_BYTES - 1024
    values = {number.to_bytes(4, "little"): bytes([number % 251]) * size for number, size in enumerate(sizes)}
    for key, value in values.items():
        assert cache.put(key, value) and cache.get(key) == value
    newest = 0
    for number, (key, value) in enumerate(reversed(values.items())):
        assert cache.get(key) in (None, value)
        newest += len(value) + 64
        if newest < ring and number == 0:
            assert cache.get(key) == value
    assert cache.num_bytes <= NUM_BYTES and os.fstat(fd).st_size == NUM_BYTES
    os.close(fd)


def test_too_large_value_is_refused(path: str) -> None:
    cache = SharedCache(path)
    cache.put(b"a", b"1")
    assert not cache.put(b"b", bytes(NUM_BYTES)) and cache.get(b"a") == b"1"


DIE = """
import fcntl, os, signal, sys
from quire.system.shared_cache import SharedCache

path, where = sys.argv[1:]
cache = SharedCache(path)

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Words:
    def __init__(self, words): self.words = words
    def __getitem__(self, index): return self.words[index]
    def __len__(self): return len(self.words)
    def __setitem__(self, index, value):
        if isinstance(index, slice): kill()
        self.words[index] = value

if where == "part":
    write = cache._write
    cache._write = lambda position, value: (write(position, value[:100]), kill())
if where == "entry":
    cache._words = Words(cache._words)
if where == "lock":
    fcntl.flock(cache._fd, fcntl.LOCK_EX)
    kill()
cache.put(b"a", b"y" * 5000)
"""
"""A process that dies in the middle of a write: after a part of the value, in its entry, or with the lock."""


@pytest.mark.parametrize("where", ["part", "entry", "lock"])
def test_process_that_dies_leaves_no_half_value(path: str, where: str) -> None:
    cache = SharedCache(path)
    values = {bytes([number]): bytes([number]) * 100 for number in range(8)}  # as many as there are entries
    for key, value in values.items():
        cache.put(key, value)
    done = subprocess.run([sys.executable, "-c", DIE, path, where], timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert cache.get(b"a") is None and all(cache.get(key) in (None, value) for key, value in values.items())
    assert cache.get(bytes([7])) == values[bytes([7])]
    assert cache.put(b"a", b"z" * 5000) and SharedCache(path).get(b"a") == b"z" * 5000


def test_write_that_others_have_overtaken_is_given_up(path: str) -> None:
    """A slow writer must not write over the values of others when the ring has come around."""
    slow: Any = SharedCache(path)
    other = SharedCache(path)
    kept = slow._is_kept
    done = [False]

    def overtaken(position: int) -> bool:
        if not done[0]:
            done[0] = True
            fcntl.flock(slow._fd, fcntl.LOCK_UN)
            for number in range(8):
                other.put(bytes([number]), bytes([number]) * 8000)
        return bool(kept(position))

    slow._is_kept = overtaken
    assert slow.put(b"slow", b"s" * 8000) and slow.get(b"slow") is None
    assert all(other.get(bytes([number])) in (None, bytes([number]) * 8000) for number in range(8))
    assert other.get(bytes([7])) == bytes([7]) * 8000
