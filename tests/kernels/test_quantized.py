"""Packed products: the layout against the gguf package, the kernel against torch, bits that stay the same."""

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import native
from quire.kernels.quantized import PACKINGS, linear, linear_reference, pack, unpack_rows

needs_native = pytest.mark.skipif(native.library() is None, reason="the native kernels do not compile here")
KINDS = sorted(PACKINGS)


def stored(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return torch.from_numpy(quantize(values, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_comes_back_out_of_the_layout(kind: str) -> None:
    """Rows, columns, scales or minima that change places while packing."""
    file = stored(kind, 24, 96, 0)
    ids = torch.tensor([3, 23, 0, 8, 3])
    expected = torch.from_numpy(dequantize(file.numpy(), GGMLQuantizationType[kind]))[ids]
    assert torch.equal(unpack_rows(pack(file, PACKINGS[kind]), ids, PACKINGS[kind]), expected)


@needs_native
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 200),
    groups=st.integers(1, 20),
    blocks=st.integers(1, 6),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_matches_torch_on_random_shapes(
    kind: str, rows: int, groups: int, blocks: int, threads: int, seed: int
) -> None:
    packed = pack(stored(kind, groups * 8, blocks * 32, seed), PACKINGS[kind])
    x = torch.randn(rows, blocks * 32, generator=torch.Generator().manual_seed(seed))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = linear(x, packed, PACKINGS[kind])
    finally:
        torch.set_num_threads(before)
    # One code of x more or less where a value lies halfway between two.
    torch.testing.assert_close(ours, linear_reference(x, packed, PACKINGS[kind]), atol=0.1, rtol=0)
    assert (ours - linear_reference(x, packed, PACKINGS[kind])).abs().mean() < 1e-3


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_codes_do_not_overflow(kind: str) -> None:
    """Sums in 16 bits that wrap or saturate where all codes are at their limits."""
    packing = PACKINGS[kind]
    file = torch.full(
        (8, 64 // 32 * packing.block_bytes), 0x80 if packing.bits == 8 else 0xFF, dtype=torch.uint8
    )
    blocks = file.view(8, -1, packing.block_bytes)
    blocks[..., : packing.head_bytes] = (
        torch.tensor([1.0], dtype=torch.float16).view(torch.uint8).repeat(packing.head_bytes // 2)
    )
    packed = pack(file, packing)
    for sign in (1.0, -1.0):
        x = torch.full((5, 64), sign)
        torch.testing.assert_close(linear(x, packed, packing), linear_reference(x, packed, packing))


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_alone_and_in_a_batch(kind: str) -> None:
    packed = pack(stored(kind, 40, 160, 1), PACKINGS[kind])
    x = torch.randn(71, 160)
    together = linear(x, packed, PACKINGS[kind])
    for row in (0, 1, 63, 64, 70):
        assert torch.equal(linear(x[row : row + 1], packed, PACKINGS[kind])[0], together[row])


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_zero_and_nan_stays_in_its_row(kind: str) -> None:
    """Division by a scale of 0; a broken request that spoils its neighbours, or that looks healthy."""
    packed = pack(stored(kind, 8, 64, 2), PACKINGS[kind])
    x = torch.zeros(4, 64)
    x[1, 40] = torch.nan
    x[2, 3] = torch.inf
    out = linear(x, packed, PACKINGS[kind])
    assert out[1].isnan().all() and not out[2].isfinite().any()
    assert not out[0].any() and not out[3].any()
