"""Tests of matmuls with e4m3 weights against torch in float64."""

import itertools

import pytest
import torch
from interpreter import more
from random_inputs import CUDA, DEVICE, DTYPE, random
from torch import Tensor

from quire.kernels.reference.fp8 import E4M3, Scaled, linear_reference, quantize_reference, quantize_weight
from quire.kernels.reference.ops import Reference
from quire.kernels.triton.fp8 import Plan, choose, gated, gated_linear, linear, multiply, quantize
from quire.kernels.triton.matmul import RowsPlan, TilesPlan

PLANS: list[Plan] = [RowsPlan(16, 4), TilesPlan(16, 64, 128, 1, 4, 3), TilesPlan(64, 64, 128, 3, 4, 3)]
gpu = pytest.mark.gpu


def rounded(num: int, size: int) -> Tensor:
    """Round to values that e4m3 represents exactly, with the largest number in each group of 128.

    Triton's interpreter loses half of a number that rounds up to a power of two.
    """
    x = random(num, size) if CUDA else (64 * random(num, size)).to(E4M3).to(DTYPE)
    if not CUDA:
        x[:, ::16] = 448
        x *= 2.0 ** -torch.randint(4, 9, (num, 1))
    return x


def stored(size_out: int, size_in: int, *, blocked: bool) -> Scaled:
    """Return rows and blocks of different magnitudes."""
    sizes = torch.rand(size_out, 1, device=DEVICE) + 0.1
    data, scale = quantize_weight(random(size_out, size_in).float() * sizes)
    if blocked:
        scale = torch.rand(-(-size_out // 128), -(-size_in // 128), device=DEVICE) / 200 + 1e-3
    if CUDA:
        torch.cuda.synchronize()
    return Scaled(data, scale)


def close(actual: Tensor, expected: Tensor, most: float = 1e-2) -> None:
    """Compare with a tolerance for bfloat16 sums and e4m3 activations, up to 6.8e-3 on an H200. The largest
    errors are of rows in which many values lie halfway between two codes: the reference divides by the scale,
    the kernel multiplies by its reciprocal, and they round such values differently."""
    assert actual.dtype == DTYPE and actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < most, error


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("size", [48, 400, 2304])
def test_quantizes_activations(size: int, grouped: bool) -> None:
    x = rounded(5, size + 8)[:, 8:]
    x[1] *= 8
    x[2] = 0
    actual, scale = quantize(x, grouped=grouped)
    expected, expected_scale = quantize_reference(x, grouped=grouped)
    torch.testing.assert_close(scale, expected_scale)
    apart = (actual.float() - expected.float()).abs()  # a tie may round to either side
    assert (apart <= expected.float().abs() / 8).all() and (apart > 0).float().mean() < 0.01


def test_quantizes_gated_activations() -> None:
    x = torch.cat((torch.full((3, 272), 30.0), rounded(3, 272).cpu()), 1).to(DEVICE, DTYPE)  # silu(30) is 30
    expected, _ = quantize_reference(Reference().gated(x, "silu"), grouped=True)
    actual, _ = quantize(x, grouped=True, gated=True)
    assert (actual.float() != expected.float()).float().mean() < 0.02


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize(
    ("plan", "num"),
    [
        (PLANS[0], 3),
        (PLANS[1], 20),
        (PLANS[2], 20),
        *more((PLANS[0], 1), (PLANS[0], 20), (PLANS[1], 1), (PLANS[2], 1)),
    ],
    ids=str,
)
def test_matmuls_of_odd_sizes(plan: Plan, num: int, blocked: bool) -> None:
    x, weight, bias = rounded(num, 416)[:, 16:], stored(150, 400, blocked=blocked), random(150)
    quantized = isinstance(plan, TilesPlan)
    close(multiply(x, weight, None, plan), linear_reference(x, weight, quantized=quantized))
    close(multiply(x, weight, bias, plan), linear_reference(x, weight, bias, quantized=quantized))


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("plan", [*PLANS[:2], TilesPlan(64, 64, 128, 1, 4, 3)], ids=str)
def test_fused_gate_and_up(plan: Plan, blocked: bool) -> None:
    x, weight = rounded(3, 272) / 16, stored(2 * 128, 272, blocked=blocked)
    expected = linear_reference(x, weight, quantized=isinstance(plan, TilesPlan))
    close(multiply(x, weight, None, plan, gated=True), Reference().gated(expected, "silu"))


@pytest.mark.parametrize("num", [1, 70])
def test_selected_kernel_multiplies(num: int) -> None:
    for blocked in (False, True):
        x, weight, bias = rounded(num, 256), stored(128, 256, blocked=blocked), random(128)
        quantized = num > 1
        close(linear(x, weight, bias), linear_reference(x, weight, bias, quantized=quantized))
        expected = Reference().gated(linear_reference(x, weight, quantized=quantized), "silu")
        close(gated(x, weight), expected, 6e-3)


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
def test_matmul_of_gated_activations(blocked: bool) -> None:
    up, weight, bias = rounded(20, 144), stored(72, 144, blocked=blocked), random(72)
    x = torch.cat((torch.full_like(up, 30.0), up / 64), 1)  # silu(30) is 30
    narrow = Reference().gated(x, "silu")
    close(gated_linear(x, weight, bias), linear_reference(narrow, weight, bias, quantized=True), 1e-2)


def test_unsupported_shapes_are_dequantized() -> None:
    for x, size in ((random(2, 40), 40), (random(2, 48).float(), 48)):
        weight = stored(24, size, blocked=False)
        expected = linear_reference(x, weight, quantized=False)
        torch.testing.assert_close(linear(x, weight), expected, rtol=4e-3, atol=4e-2)


@gpu
@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("num", [1, 2, 5, 8, 16, 31, 64, 100, 128, 200, 256, 1000])
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 4096), (4096, 14336), (28672, 4096), (1000, 2064)])
def test_real_shapes(size_out: int, size_in: int, num: int, blocked: bool) -> None:
    x, weight = random(num, size_in) / size_in**0.5, stored(size_out, size_in, blocked=blocked)
    expected = linear_reference(x, weight, quantized=num > 1)
    close(linear(x, weight), expected)
    if not blocked or size_out // 2 % 128 == 0:
        close(gated(x, weight), Reference().gated(expected, "silu"), 1e-2)
    assert torch.equal(linear(x, weight), linear(x, weight))


def test_every_shape_has_a_plan_that_fits() -> None:
    sizes = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (64, 32)
    for case in itertools.product(range(1, 300, 7), sizes, (1, 2), (False, True)):
        num, (size_out, size_in), parts, blocked = case
        plan = choose(num, size_out, size_in, parts, blocked)
        if isinstance(plan, RowsPlan):
            assert size_in <= 16384 and 128 % plan.rows == 0, case
        if isinstance(plan, TilesPlan):
            assert not blocked or plan.rows <= plan.length == 128, case
            assert plan.stages * plan.length * (plan.num + parts * plan.rows) <= 227 * 1024, case
