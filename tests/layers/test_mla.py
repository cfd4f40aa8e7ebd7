import pytest
import torch

from quire.attention.mla import MLASpec
from quire.checkpoint.facts import RopeFacts
from quire.layers.mla import MLAAttention
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.layers.scope import Scope

SPEC = MLASpec(heads=2, rank=8, nope_dim=4, rope_dim=4, v_dim=6, scale=0.3)


def make(scope: Scope) -> MLAAttention:
    rope = Rope(RopeFacts(dim=4, max_len=64), scope)
    return MLAAttention(SPEC, rope, RMSNorm(8, 1e-6, scope / "norm"), scope / "kv_b_proj")


def test_kv_b_weight_is_loaded_as_stored(scope: Scope) -> None:
    (target,) = make(scope).targets()
    assert (target.name, tuple(target.tensor.shape)) == ("kv_b_proj.weight", (20, 8))


def test_cache_of_the_wrong_width_is_rejected(scope: Scope) -> None:
    layer = make(scope)
    layer.bind(torch.zeros(3, 4, 12))
    with pytest.raises(AssertionError):
        layer.bind(torch.zeros(3, 4, 8))


def test_cache_is_one_plane(scope: Scope) -> None:
    layer, memory = make(scope), torch.zeros(3 * 4 * 12 * 4, dtype=torch.uint8)
    assert layer.cache_spec.page == (1, 12)
    layer.bind_memory(memory, block_size=4, cache_dtype=torch.float32, group=0)
    assert layer.cache is not None and layer.cache.shape == (3, 4, 12)
    layer.bind_memory(memory, block_size=4, cache_dtype=torch.float8_e4m3fn, group=0)
    assert layer.cache.shape == (12, 4, 12) and layer.cache.dtype == torch.float8_e4m3fn
