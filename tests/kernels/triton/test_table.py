"""Products with weights of 4 bits and a table against torch, in float64."""

import pytest
import torch
from torch import Tensor

from quire.kernels.reference import Reference
from quire.kernels.table import Halves, in_halves, product_reference, split
from quire.kernels.triton.int8 import Plan, Tiles
from quire.kernels.triton.matmul import Rows
from quire.kernels.triton.table import Product, multiply, widen

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float16
PLANS: list[Plan] = [Rows(4, 4), Tiles(16, 64, 64, 4, 3), Tiles(64, 64, 64, 4, 3)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def weight_of(size_out: int, size_in: int) -> Halves:
    codes = torch.randint(0, 16, (size_out, size_in), dtype=torch.uint8, device=DEVICE)
    packed = in_halves(codes)
    assert torch.equal(split(packed), codes)
    scales = torch.rand(size_out, size_in // 64, device=DEVICE) / size_in**0.5
    weight = Halves(packed, scales, torch.randn(16, device=DEVICE))
    if CUDA:
        torch.cuda.synchronize()  # kernels may read a weight before the kernel in front of them has ended
    return weight


def close(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == DTYPE and ours.shape == expected.shape
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    assert error < 6e-3, error


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_products_of_odd_sizes(plan: Plan) -> None:
    for num in (1, 3) if isinstance(plan, Rows) else (1, 19):
        x, weight, bias = random(num, 400)[:, :384], weight_of(37, 384), random(37)
        close(multiply(x, weight, None, plan), product_reference(x, weight))
        close(multiply(x, weight, bias, plan), product_reference(x, weight, bias))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gate_and_up_in_one(plan: Plan) -> None:
    x, weight = random(2, 128), weight_of(2 * 21, 128)
    expected = Reference().gated(product_reference(x, weight), "silu")
    close(multiply(x, weight, None, plan, gated=True), expected)


@pytest.mark.parametrize("num", [0, 1, 20, 130])
def test_what_is_chosen_multiplies(num: int) -> None:
    x, weight, bias = random(num, 260)[:, 4:], weight_of(70, 256), random(70)
    assert torch.equal(widen(weight, DTYPE), weight.widened(DTYPE))
    ours = Product(weight, bias)(x), Product(weight, None).gated(x)
    if num:
        close(ours[0], product_reference(x, weight, bias))
        close(ours[1], Reference().gated(product_reference(x, weight), "silu"))
    assert [len(y) for y in ours] == [num, num]


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 2, 8, 31, 64, 128, 300])
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 4096), (4096, 14336)])
def test_real_shapes(size_out: int, size_in: int, num: int) -> None:
    x, weight = random(num, size_in), weight_of(size_out, size_in)
    product = Product(weight, None)
    close(product(x), product_reference(x, weight))
    close(product.gated(x), Reference().gated(product_reference(x, weight), "silu"))
