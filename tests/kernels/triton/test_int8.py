"""Tests of matmuls with INT8 weights against torch in float64."""

import pytest
import torch
from interpreter import more
from products import exact_product
from random_inputs import CUDA, DEVICE, DTYPE, random
from torch import Tensor

from quire.kernels.reference import int8 as reference
from quire.kernels.reference.int8 import Int8Codes, quantize
from quire.kernels.reference.moe import ExpertWeights
from quire.kernels.reference.moe import mix as mix_reference
from quire.kernels.reference.ops import Reference
from quire.kernels.triton.int8 import Int8GEMM, Int8TilesPlan, Plan, multiply, round_rows
from quire.kernels.triton.int8_moe import ExpertCodes, mix
from quire.kernels.triton.matmul import RowsPlan

TILES = [Int8TilesPlan(16, 64, 64, 4, 3), Int8TilesPlan(64, 64, 128, 4, 3)]


def weight_of(*shape: int) -> Int8Codes:
    """Return a weight with outputs of very different magnitudes."""
    made = quantize(torch.randn(*shape, device=DEVICE) * torch.rand(shape[0], 1, device=DEVICE) * 0.1)
    if CUDA:
        torch.cuda.synchronize()  # kernels may read a weight before the previous kernel has ended
    return made


def close(actual: Tensor, expected: Tensor, limit: float = 4e-3) -> None:
    assert actual.dtype == DTYPE and actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < limit, error


@pytest.mark.parametrize("static", [None, 0.02])
def test_rows_are_quantized_by_their_largest_number(static: float | None) -> None:
    x = (random(5, 112) * torch.tensor([1e-3, 1.0, 0.0, 1.0, 50.0], device=DEVICE)[:, None].to(DTYPE))[:, 8:]
    scale = None if static is None else torch.tensor([static], device=DEVICE)
    actual, expected = round_rows(x, scale), reference.round_rows(x, scale)
    torch.testing.assert_close(actual.scales, expected.scales)
    assert (actual.codes.int() - expected.codes.int()).abs().max() <= 1  # halves may round either way
    assert static is None or (actual.codes.abs().max() == 127)


def test_second_part_is_the_residual_of_the_first() -> None:
    x = random(5, 100)
    (first, second), scales = round_rows(x, parts=2).codes.view(2, 5, 100), round_rows(x).scales
    wide = (first.double() + second.double() / 254) * scales.double()[:, None]
    assert ((wide - x.double()).abs().amax(1) <= x.double().abs().amax(1) / 127 / 254 * 0.51).all()


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_row_kernels_of_odd_sizes(num: int, gated: bool) -> None:
    x, weight, bias = random(num, 112)[:, :97], weight_of(38, 97), None if gated else random(38)
    expected = exact_product(x, weight, bias)
    expected = Reference().gated(expected, "silu") if gated else expected
    close(multiply(x, None, weight, bias, RowsPlan(8, 4), gated=gated), expected)


@pytest.mark.parametrize(
    ("plan", "num", "gated"),
    [
        (TILES[0], 20, False),
        (TILES[1], 70, True),
        *more((TILES[0], 3, False), (TILES[0], 3, True), (TILES[0], 70, False), (TILES[0], 70, True)),
        *more((TILES[1], 3, False), (TILES[1], 3, True), (TILES[1], 70, False)),
    ],
    ids=str,
)
def test_tile_kernels_of_odd_sizes(plan: Plan, num: int, gated: bool) -> None:
    x, weight, bias = random(num, 96), weight_of(38, 96), None if gated else random(38)
    for parts in (1, 2):
        rounded = round_rows(x, parts=parts)
        wide = x.double() if parts == 2 else rounded.codes.double() * rounded.scales.double()[:, None]
        expected = exact_product(wide, weight, bias).to(DTYPE)
        expected = Reference().gated(expected, "silu") if gated else expected
        close(multiply(x, rounded, weight, bias, plan, gated=gated), expected)


@pytest.mark.parametrize(
    ("num", "rounds"),
    [
        (0, False),
        (1, False),
        (40, False),
        (70, True),
        *more((0, True), (1, True), (5, False), (5, True), (40, True), (130, False), (130, True)),
    ],
)
def test_selected_kernel_multiplies(num: int, rounds: bool) -> None:
    """Check no rows, more rows than planned, and a width that the copy engine cannot read."""
    for size_in in (128, 100):
        x, weight, bias = random(num, size_in), weight_of(48, size_in), random(48)
        limit = 2e-2 if rounds and num > 64 else 6e-3
        product = Int8GEMM(weight, bias, rounds=rounds)
        if num:
            close(product(x), exact_product(x, weight, bias), limit)
            expected = Reference().gated(exact_product(x, weight), "silu")
            close(Int8GEMM(weight, None, rounds=rounds).gated(x), expected, limit)
        else:
            assert product(x).shape == (0, 48)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 2, 8, 31, 64, 128, 300])
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 4096), (4096, 14336), (1024, 2048)])
def test_real_shapes(size_out: int, size_in: int, num: int) -> None:
    x, weight = random(num, size_in), weight_of(size_out, size_in)
    for rounds in (False, True):
        product = Int8GEMM(weight, None, rounds=rounds)
        limit = 2e-2 if rounds else 6e-3
        close(product(x), exact_product(x, weight), limit)
        small = x / size_in**0.5
        expected = Reference().gated(exact_product(small, weight), "silu")
        close(product.gated(small), expected, limit)


@pytest.mark.parametrize(
    ("num", "biased"),
    [(0, False), (1, False), (40, True), *more((0, True), (1, True), (9, False), (9, True), (40, False))],
)
def test_experts(num: int, biased: bool) -> None:
    """Check for scales of another expert and tiles shared by several experts."""
    hidden, inner, shape = 80, 48, (3, 2 * 48)
    gate_up, down = (
        quantize(torch.randn(*shape, hidden, device=DEVICE) / 9),
        quantize(random(3, hidden, inner) / 7),
    )
    biases = (random(*shape), random(3, hidden)) if biased else ()
    x, ids = random(num, hidden), torch.rand(num, 3, device=DEVICE).topk(2).indices.to(torch.int32)
    ids[:1, 0] = -1  # an expert on another rank
    weights = torch.rand(num, 2, device=DEVICE)
    actual = mix(x, ids, weights, ExpertCodes(gate_up, down, *biases), "silu")
    wide = ExpertWeights(
        gate_up.widened(torch.float32), down.widened(torch.float32), *map(Tensor.float, biases)
    )
    expected = mix_reference(x.float(), ids, weights, wide, "silu")
    if num:
        close(actual, expected, 1e-2)
    assert actual.shape == x.shape
