"""Tests of FP8 matmuls: every code, row and block scales, experts, and batch invariance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_threads import torch_threads

from quire.checkpoint.facts import Routing
from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import GGUFRows
from quire.kernels.cpu.linear import FP8_FORMS, LinearProduct, Matrix, linear_reference
from quire.kernels.cpu.moe import CpuExperts, route
from quire.kernels.reference import moe
from quire.kernels.reference.moe import ExpertWeights

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
KINDS = sorted(FP8_FORMS, key=str)
BLOCKS = [None, (128, 128), (7, 32), (1000, 10000)]


def make(
    kind: torch.dtype, rows: int, columns: int, seed: int, block: tuple[int, int] | None = None
) -> tuple[Matrix, Tensor]:
    """Return a matrix and its values in float64."""
    random = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=random) * 20).to(kind)
    high, wide = block or (1, columns)
    scales = torch.rand(-(-rows // high), -(-columns // wide), generator=random) / 20
    spread = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    return Matrix.fp8(weight, scales, block), weight.double() * spread


@pytest.mark.parametrize("num_rows", [1, 3, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_matches_torch(kind: torch.dtype, num_rows: int) -> None:
    """Check subnormal numbers, the sign of zero, and NaN, which must not become 480."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[:, None].view(kind)
    scales = torch.tensor([1.0] * 256 + [0.375] * 256)
    expected = codes.float()[:, 0] * scales
    for columns in (1, 40):  # numbers of codes that do and do not fill a vector
        weight = codes.view(torch.uint8).expand(512, columns).contiguous().view(kind)
        matrix = Matrix.fp8(weight, scales)
        actual = LinearProduct([matrix])(torch.full((num_rows, columns), 1.0 / columns))
        torch.testing.assert_close(actual, expected.expand(num_rows, 512), equal_nan=True, rtol=1e-5, atol=0)
        rows = GGUFRows(matrix)(torch.arange(512), torch.float32)
        full = expected[:, None].expand(512, columns)
        torch.testing.assert_close(rows, full, equal_nan=True, rtol=0, atol=0)


@given(
    kind=st.sampled_from(KINDS),
    block=st.sampled_from(BLOCKS),
    x_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_rows=st.one_of(st.integers(1, 40), st.integers(250, 300)),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    columns=st.one_of(st.integers(1, 300), st.integers(1000, 2100)),
    num_threads=st.sampled_from([1, 2, 3]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_matches_torch_on_random_shapes(
    kind: torch.dtype,
    block: tuple[int, int] | None,
    x_dtype: torch.dtype,
    num_rows: int,
    sizes: list[int],
    columns: int,
    num_threads: int,
    with_bias: bool,
    seed: int,
) -> None:
    """Check for the scale of another row, block or part."""
    parts = [make(kind, size, columns, seed + i, block) for i, size in enumerate(sizes)]
    random = torch.Generator().manual_seed(seed)
    bias = torch.randn(sum(sizes), generator=random) if with_bias else None
    x = torch.randn(num_rows, columns + 3, generator=random).to(x_dtype)[:, :columns]
    with torch_threads(num_threads):
        actual = LinearProduct([matrix for matrix, _ in parts], bias)(x).double()
    full = torch.cat([values for _, values in parts])
    expected = linear_reference(x, full, bias).double()
    usual = x.double().norm() * full.norm() / columns**0.5  # one sum may be near 0 by chance
    tolerance = 1e-2 if x_dtype == torch.bfloat16 else 1e-6
    assert (actual - expected).norm() <= tolerance * (expected.norm() + usual)


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_bits_do_not_depend_on_batch_or_threads(block: tuple[int, int] | None) -> None:
    """Check for another order of summation or scaling in another path of the kernel."""
    product = LinearProduct([make(torch.float8_e4m3fn, 37, 1100, 1, block)[0]])
    x = torch.randn(551, 1100)
    together = product(x)
    for start, end in ((0, 1), (550, 551), (3, 5), (60, 64), (10, 15), (255, 271), (7, 90), (100, 500)):
        assert torch.equal(product(x[start:end]), together[start:end])
    for number in (1, 2, 3):
        with torch_threads(number):
            assert torch.equal(product(x), together)
            assert torch.equal(product(x[:1]), together[:1])


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_fp8_experts(block: tuple[int, int] | None) -> None:
    """Check for scales of another expert, and swapped scales of gate and up."""
    torch.manual_seed(0)
    num_experts, hidden, size = 7, 170, 145
    shapes = (size, hidden), (size, hidden), (hidden, size)
    made = [[make(KINDS[0], *shape, 9 * i + j, block) for i in range(7)] for j, shape in enumerate(shapes)]
    gate, up, down = ([matrix for matrix, _ in of] for of in made)
    values = [torch.stack([value for _, value in of]).float() for of in made]
    weights = ExpertWeights(torch.cat(values[:2], 1), values[2])
    actual = CpuExperts(list(zip(gate, up, strict=True)), down, "silu")
    for num_tokens in (1, 2, 33):
        x = torch.randn(num_tokens, hidden)
        chosen = route(torch.randn(num_tokens, num_experts), Routing(3))
        expected = moe.mix(x, *chosen, weights, "silu").double()
        assert (actual(x, *chosen).double() - expected).norm() <= 2e-6 * expected.norm()
