"""Tests of matmuls with plain weights against torch in float64, and of batch invariance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_threads import torch_threads

from quire.kernels.cpu import native
from quire.kernels.cpu.linear import LinearProduct, Matrix, linear_reference

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
TYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    dtype=st.sampled_from(TYPES),
    x_dtype=st.sampled_from(TYPES),
    num_rows=st.one_of(st.integers(1, 150), st.integers(250, 560)),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    columns=st.one_of(st.integers(1, 200), st.integers(1000, 2100)),
    num_threads=st.sampled_from([1, 2, 3]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_matches_torch_on_random_shapes(
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    num_rows: int,
    sizes: list[int],
    columns: int,
    num_threads: int,
    with_bias: bool,
    seed: int,
) -> None:
    parts = [random(size, columns, seed=seed + i, dtype=dtype) for i, size in enumerate(sizes)]
    bias = random(sum(sizes), seed=seed) if with_bias else None
    # Rows may be strided.
    x = random(num_rows, columns + 3, seed=seed, dtype=x_dtype)[:, :columns]
    with torch_threads(num_threads):
        actual = LinearProduct([Matrix.plain(part) for part in parts], bias)(x)
    assert actual.dtype == x_dtype
    expected = linear_reference(x, torch.cat(parts), bias)
    tolerance = 1e-2 if x_dtype == torch.bfloat16 else 1e-6
    usual = (
        x.double().norm() * torch.cat(parts).double().norm() / columns**0.5
    )  # one sum may be near 0 by chance
    error = (actual.double() - expected.double()).norm()
    assert error <= tolerance * (expected.double().norm() + usual)


@pytest.mark.parametrize("x_dtype", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_batch_or_threads(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """Check for another order of summation in another path of the kernel."""
    product = LinearProduct([Matrix.plain(random(37, 1100, seed=1, dtype=dtype))])
    x = random(551, 1100, seed=2, dtype=x_dtype)
    together = product(x)
    for start, end in ((0, 1), (550, 551), (3, 5), (60, 64), (10, 15), (255, 271), (7, 90), (100, 500)):
        assert torch.equal(product(x[start:end]), together[start:end])
    for number in (1, 2, 3, 5):
        with torch_threads(number):
            assert torch.equal(product(x), together)
            assert torch.equal(product(x[:1]), together[:1])


@pytest.mark.parametrize("num_rows", [1, 4, 40])
@pytest.mark.parametrize("dtype", TYPES)
def test_nan_stays_in_its_row(dtype: torch.dtype, num_rows: int) -> None:
    """Check that NaN neither spreads to other rows nor vanishes."""
    product = LinearProduct([Matrix.plain(random(20, 70, seed=1, dtype=dtype))])
    for broken in (torch.nan, torch.inf):
        x = random(num_rows, 70, seed=3)
        x[num_rows // 2, 69] = broken
        out = product(x)
        assert not out[num_rows // 2].isfinite().any()
        assert out.isfinite().all(dim=1).sum() == num_rows - 1


def test_no_rows_give_no_rows() -> None:
    assert LinearProduct([Matrix.plain(random(20, 70, seed=1))])(torch.empty(0, 70)).shape == (0, 20)
