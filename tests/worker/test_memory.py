"""What the cache may take of a machine's memory."""

from typing import Any

import psutil
import pytest

from quire.config.machine import Machine
from quire.config.sections import CacheSection
from quire.errors import ConfigError
from quire.worker.memory import cache_room

MACHINE = Machine(device="cpu", name="test", num_devices=1, total_bytes=1000, free_bytes=600, num_cores=1)


def section(**settings: Any) -> CacheSection:
    usual: dict[str, Any] = {"gpu_memory_utilization": 0.9, "kv_cache_dtype": "float32"}
    return CacheSection(**(usual | settings))


def kv_bytes(other_bytes: int = 500, **settings: Any) -> int:
    return cache_room(section(**settings), MACHINE, other_bytes=other_bytes).kv_bytes


def test_the_share_is_what_utilization_leaves_beside_the_model() -> None:
    assert kv_bytes() == 400
    assert kv_bytes(other_bytes=950) == -50


def test_no_more_than_is_free() -> None:
    assert kv_bytes(other_bytes=0) == 600


def test_free_memory_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that were just loaded are no longer free, whatever was found at start."""
    now = psutil.virtual_memory()._replace(available=123)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    assert kv_bytes(other_bytes=0) == 123


def test_a_limit_makes_the_share_a_default() -> None:
    room = cache_room(section(kv_cache_memory_limit=50), MACHINE, other_bytes=500)
    assert room.kv_bytes == 50 and room.soft
    assert not cache_room(section(), MACHINE, other_bytes=500).soft


def test_exact_bytes_are_taken_as_given_or_refused() -> None:
    assert kv_bytes(kv_cache_memory_bytes=599) == 599
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=601 .* lower it to at most 600"):
        kv_bytes(kv_cache_memory_bytes=601)


def test_an_override_needs_no_bytes() -> None:
    room = cache_room(section(num_gpu_blocks_override=9, kv_cache_memory_bytes=10**9), MACHINE, other_bytes=0)
    assert room.num_blocks_override == 9
