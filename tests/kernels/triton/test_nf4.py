"""Tests of matmuls with NF4 weights against torch in float64."""

import pytest
import torch
from products import exact_product
from random_inputs import CUDA, DEVICE, DTYPE, random

from quire.kernels.reference.nf4 import Halves, in_halves, split
from quire.kernels.triton.nf4 import linear, widen


def weight_of(size_out: int, size_in: int) -> Halves:
    codes = torch.randint(0, 16, (size_out, size_in), dtype=torch.uint8, device=DEVICE)
    packed = in_halves(codes)
    assert torch.equal(split(packed), codes)
    scales = torch.rand(size_out, size_in // 64, device=DEVICE) / size_in**0.5
    weight = Halves(packed, scales, torch.randn(16, device=DEVICE))
    if CUDA:
        torch.cuda.synchronize()  # kernels may read a weight before the previous kernel has ended
    return weight


@pytest.mark.parametrize(
    ("size_out", "size_in"), [(37, 384), (5, 2176), pytest.param(6144, 4096, marks=pytest.mark.gpu)]
)
def test_nf4_matmuls(size_out: int, size_in: int) -> None:
    """Check for wrong scales in the second half of a row and for missing ends of rows."""
    x, weight, bias = random(3, size_in), weight_of(size_out, size_in), random(size_out)
    assert torch.equal(widen(weight, DTYPE), weight.widened(DTYPE))
    expected = exact_product(x, weight, bias)
    error = (linear(x, weight, bias).double() - expected.double()).norm() / expected.double().norm()
    assert error < 6e-3, error
