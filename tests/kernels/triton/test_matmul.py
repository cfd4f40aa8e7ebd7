"""Tests of matmuls with few rows against torch in float64."""

import itertools

import pytest
from interpreter import more
from random_inputs import DTYPE, random
from torch import Tensor

from quire.kernels.reference.ops import Reference
from quire.kernels.triton.matmul import Plan, RowsPlan, TilesPlan, choose, gated, linear, multiply

PLANS = [
    RowsPlan(2, 4),
    RowsPlan(8, 4),
    TilesPlan(16, 32, 64, 1, 4, 3),
    TilesPlan(16, 16, 32, 3, 4, 3),
    TilesPlan(64, 32, 32, 2, 4, 3),
]
gpu = pytest.mark.gpu


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == DTYPE and actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < 4e-3, error


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


BRANCHES = [(PLANS[0], 1), (PLANS[1], 3), (PLANS[2], 16), (PLANS[3], 20), (PLANS[4], 70)]
OTHERS = [case for case in itertools.product(PLANS, (1, 3, 16, 70)) if case not in BRANCHES]


@pytest.mark.parametrize(("plan", "num"), [*BRANCHES, *more(*OTHERS)], ids=str)
def test_matmuls_of_odd_sizes(plan: RowsPlan | TilesPlan, num: int) -> None:
    x, weight, bias = random(num, 112)[:, 8:], random(37, 104), random(37)
    close(multiply(x, weight, None, plan), product(x, weight))
    close(multiply(x, weight, bias, plan), product(x, weight) + bias.double())


@pytest.mark.parametrize("plan", [*PLANS[:3], TilesPlan(64, 32, 32, 1, 4, 3)], ids=str)
def test_fused_gate_and_up(plan: RowsPlan | TilesPlan) -> None:
    x, weight = random(3, 72), random(2 * 21, 72)
    expected = Reference().gated(product(x, weight).to(DTYPE), "silu").double()
    close(multiply(x, weight, None, plan, gated=True), expected)


@pytest.mark.parametrize("num", [1, 16, 40, 130, *more(5, 90, 192, 260)])
def test_selected_kernel_multiplies(num: int) -> None:
    x, weight, bias = random(num, 256), random(64, 256), random(64)
    close(linear(x, weight), product(x, weight))
    close(linear(x, weight, bias), product(x, weight) + bias.double())
    close(gated(x, weight), Reference().gated(product(x, weight).to(DTYPE), "silu").double())


def test_split_matmuls_can_follow_each_other() -> None:
    """Check that the counters are zero after each."""
    x, weight = random(2, 256), random(64, 256)
    for _ in range(3):
        close(multiply(x, weight, None, TilesPlan(16, 16, 32, 4, 4, 3)), product(x, weight))


SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 4096), (4096, 14336), (151936, 1024)]


@gpu
@pytest.mark.parametrize("num", [1, 2, 4, 8, 16, 31, 48, 100, 128, 160, 256])
@pytest.mark.parametrize(("size_out", "size_in"), SHAPES)
def test_real_shapes(size_out: int, size_in: int, num: int) -> None:
    x, weight = random(num, size_in), random(size_out, size_in)
    close(linear(x, weight), product(x, weight))
    plans: list[Plan] = [RowsPlan(4, 8), TilesPlan(16, 32, 128, 1 if size_out > 50000 else 4, 4, 4)]
    for plan in plans:
        if plan is not None:
            close(multiply(x, weight, None, plan), product(x, weight))


@gpu
@pytest.mark.parametrize("num", [1, 4, 8, 16, 32, 50, 128, 144, 192, 256])
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 1024), (28672, 4096)])
def test_real_gate_shapes(size_out: int, size_in: int, num: int) -> None:
    x, weight = random(num, size_in) / size_in**0.5, random(size_out, size_in)
    close(gated(x, weight), Reference().gated(product(x, weight).to(DTYPE), "silu").double())


def test_slice_that_the_copy_engine_cannot_read() -> None:
    x, weight = random(20, 260)[:, 4:], random(64, 256)
    close(linear(x, weight), product(x, weight))


def test_every_shape_has_a_plan_that_fits() -> None:
    sizes = [*SHAPES, (100, 96), (6144, 1024), (28672, 4096), (512, 20000)]
    for case in itertools.product(range(1, 257), sizes, (1, 2)):
        num, (size_out, size_in), parts = case
        plan = choose(num, size_out, size_in, parts)
        assert plan is None or plan.rows * (plan.warps > 0) > 0, case
        assert not isinstance(plan, RowsPlan) or size_in <= 16384, case
