"""Tests of the memory available to the KV cache and its partition among layers."""

from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from quire.checkpoint.layout import CacheSpec, layout
from quire.config.machine import Machine
from quire.config.sections import CacheSection
from quire.errors import ConfigError
from quire.worker.memory import bind, cache_room

MACHINE = Machine(device="cpu", name="test", num_devices=1, total_bytes=1000, free_bytes=600, num_cores=1)


def section(**settings: Any) -> CacheSection:
    usual: dict[str, Any] = {"gpu_memory_utilization": 0.9, "kv_cache_dtype": "float32"}
    return CacheSection(**(usual | settings))


def kv_bytes(other_bytes: int = 500, **settings: Any) -> int:
    return cache_room(section(**settings), MACHINE, other_bytes=other_bytes).kv_bytes


def test_cache_bytes_are_utilization_minus_the_model() -> None:
    assert kv_bytes() == 400
    assert kv_bytes(other_bytes=950) == -50


def test_cache_bytes_do_not_exceed_free_memory() -> None:
    assert kv_bytes(other_bytes=0) == 600


def test_free_memory_is_measured_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the loaded weights are no longer counted as free."""
    now = psutil.virtual_memory()._replace(available=123)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    assert kv_bytes(other_bytes=0) == 123


def test_memory_limit_applies_to_utilization_only() -> None:
    room = cache_room(section(kv_cache_memory_limit=50), MACHINE, other_bytes=500)
    assert room.kv_bytes == 50 and room.soft
    assert not cache_room(section(), MACHINE, other_bytes=500).soft


def test_kv_cache_memory_bytes_is_exact_or_rejected() -> None:
    assert kv_bytes(kv_cache_memory_bytes=599) == 599
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=601 .* lower it to at most 600"):
        kv_bytes(kv_cache_memory_bytes=601)


def test_block_override_needs_no_memory() -> None:
    room = cache_room(section(num_gpu_blocks_override=9, kv_cache_memory_bytes=10**9), MACHINE, other_bytes=0)
    assert room.num_blocks_override == 9


class FakeLayer:
    """A layer that only binds its memory."""

    def __init__(self, keeps: CacheSpec) -> None:
        self.cache_spec = keeps

    def bind_memory(self, memory: Tensor, *, block_size: int, cache_dtype: torch.dtype, group: int) -> None:
        self.memory, self.group = memory, group


FULL, NARROW = CacheSpec("full", elements=8), CacheSpec("window", elements=8, window=5)
LATENT, STATE = CacheSpec("latent", planes=1, elements=24), CacheSpec("state", bytes_per_row=48)
BLOCKS, PAGE = 10, 4 * 2 * 8 * 2


def bound(specs: list[CacheSpec | None]) -> list[FakeLayer]:
    layers = [FakeLayer(spec) for spec in specs if spec is not None]
    cpu = torch.device("cpu")
    sizes = {"num_blocks": BLOCKS, "num_rows": 3, "block_size": 4}
    sizes |= {"cache_dtype": torch.bfloat16, "device": cpu}
    bind(layers, layout(specs, 100), **sizes)  # type: ignore[arg-type]
    return layers


def test_layers_of_different_groups_share_memory() -> None:
    """Check also that the layers of one group get successive parts."""
    layers = bound([NARROW, FULL, None, NARROW, FULL])
    assert [layer.group for layer in layers] == [1, 0, 1, 0]
    first, second = layers[0].memory.data_ptr(), layers[2].memory.data_ptr()
    assert [layer.memory.data_ptr() for layer in layers] == [first, first, second, second]
    assert second - first == len(layers[0].memory) == BLOCKS * PAGE


def test_pages_of_several_kinds_and_states() -> None:
    layers = bound([LATENT, STATE, FULL, STATE])
    assert [layer.group for layer in layers] == [0] * 4
    assert [len(layers[0].memory), len(layers[2].memory)] == [BLOCKS * 4 * 24 * 2, BLOCKS * PAGE]
    assert layers[2].memory.data_ptr() == layers[0].memory.data_ptr() + BLOCKS * 4 * 24 * 2
    assert layers[1].memory.shape == (3 + 1, 48) and not layers[1].memory.any()
    assert layers[1].memory.data_ptr() != layers[3].memory.data_ptr()


def test_draft_layers_have_their_own_memory() -> None:
    layers = bound([NARROW, FULL, NARROW, FULL, LATENT])
    assert [layer.group for layer in layers] == [1, 0, 1, 0, 0]
    assert layers[0].memory.data_ptr() == layers[1].memory.data_ptr()
    spans = sorted({(layer.memory.data_ptr(), len(layer.memory)) for layer in layers})
    assert [size for _, size in spans].count(BLOCKS * 4 * 24 * 2) == 1 and len(spans) == 3
    assert all(at + size <= after for (at, size), (after, _) in zip(spans, spans[1:], strict=False))


def test_layer_with_unplanned_cache_spec_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="layer 1 has cache spec"):
        cpu = torch.device("cpu")
        sizes = {"num_blocks": 2, "num_rows": 3, "block_size": 4, "cache_dtype": torch.float32, "device": cpu}
        bind([FakeLayer(FULL), FakeLayer(NARROW)], layout([FULL, FULL], 100), **sizes)  # type: ignore[arg-type]
