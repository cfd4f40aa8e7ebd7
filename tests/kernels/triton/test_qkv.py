"""Tests of the fused QKV matmul, RoPE and cache write against separate operations."""

import pytest
import torch
from torch import Tensor

from quire.kernels.ops import HeadEntry, HeadNorms
from quire.kernels.reference.fp8 import Scaled, dequantize, quantize_weight
from quire.kernels.reference.ops import Reference
from quire.kernels.triton.qkv import enter

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.gpu


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def case(heads: int, kv_heads: int, dim: int, cache_dtype: torch.dtype = torch.float16) -> HeadEntry:
    angles = torch.randn(64, dim // 2, device=DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), 1).half()
    positions = torch.randint(0, 64, (1,), device=DEVICE)
    slots = torch.randperm(48, device=DEVICE)[:1]
    caches = [torch.ones(3, 16, kv_heads, dim, device=DEVICE).to(cache_dtype) for _ in "kv"]
    return HeadEntry(heads, table, positions, slots, *caches)


def check(
    entry: HeadEntry, x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> None:
    """Check for wrong RoPE halves or angles, rotated values, wrong slots and missing biases."""
    fused_entry = entry._replace(k_cache=entry.k_cache.clone(), v_cache=entry.v_cache.clone())
    wide = weight if scale is None else dequantize(Scaled(weight, scale), torch.float32)
    product = x.double() @ wide.double().t()
    product = product if bias is None else product + bias.double()
    expected = Reference().rotate_and_write(product.to(x.dtype), entry)
    q = enter(x, fused_entry, weight, bias, scale)
    assert q is not None
    torch.testing.assert_close(q, expected, rtol=0.01, atol=0.02)
    for actual, reference in ((fused_entry.k_cache, entry.k_cache), (fused_entry.v_cache, entry.v_cache)):
        narrow = actual.element_size() == 1
        near = torch.isclose(
            actual.float(), reference.float(), rtol=0.13 if narrow else 0.01, atol=0.05 if narrow else 0.02
        )
        # The interpreter loses the carry into the exponent when it rounds to 8 bits.
        assert near.all() or (narrow and not CUDA and near.float().mean() > 0.99)
        written = (reference.float() != 1).flatten(2).any(2)
        assert torch.equal((actual.float() != 1).flatten(2).any(2), written)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
def test_one_token(heads: tuple[int, int], biased: bool) -> None:
    entry, size = case(*heads, 32), 32 * (heads[0] + 2 * heads[1])
    x, weight = random(1, 1000) / 32, random(size, 1000)
    check(entry, x, weight, random(size) if biased else None)


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
def test_qkv_weight_in_e4m3(blocked: bool) -> None:
    weight, scale = quantize_weight(torch.randn(256, 512, device=DEVICE))
    scale = torch.rand(2, 4, device=DEVICE) / 100 if blocked else scale
    check(case(4, 2, 32), random(1, 512) / 16, weight, scale=scale)


def test_padding_is_not_written() -> None:
    entry = case(4, 2, 32)
    entry.slots[0] = -1
    check(entry, random(1, 512) / 16, random(256, 512))


def test_8_bit_cache() -> None:
    entry = case(4, 2, 32, torch.float8_e4m3fn)._replace(k_scale=0.25, v_scale=0.5)
    check(entry, random(1, 512) / 16, random(256, 512))


def test_unsupported_cases_are_not_fused() -> None:
    x, weight = random(1, 512), random(256, 512)
    assert enter(x, case(4, 2, 32, torch.int8), weight, None) is None
    entry = case(4, 2, 32)
    assert enter(x[:0], entry, weight, None) is None
    assert enter(random(2, 512), entry, weight, None) is None
    assert enter(x.float(), entry, weight.float(), None) is None
    norms = HeadNorms(random(32), random(32), 1e-6)
    assert enter(x, entry._replace(norms=norms), weight, None) is None
    assert enter(x, entry._replace(table=entry.table[:, :16]), weight, None) is None
    assert enter(random(1, 20000), entry, random(256, 20000), None) is None


@gpu
@pytest.mark.parametrize(
    "heads", [(32, 8, 128, 4096), (32, 8, 64, 2048), (28, 4, 128, 3584), (40, 40, 128, 5120)]
)
def test_real_sizes(heads: tuple[int, int, int, int]) -> None:
    *shape, size_in = heads
    entry = case(*shape)
    size = shape[2] * (shape[0] + 2 * shape[1])
    check(entry, random(1, size_in) / size_in**0.5, random(size, size_in), random(size))
