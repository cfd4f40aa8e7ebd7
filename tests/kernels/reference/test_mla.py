"""Tests of the per-head matmuls of MLA in C against torch with any size and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.attention import mla as reference
from quire.attention.mla import MLASpec
from quire.kernels.cpu import native
from quire.kernels.reference import mla

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=tolerance, rtol=tolerance)


def both(q: Tensor, seen: Tensor, weight: Tensor, spec: MLASpec) -> tuple[Tensor, Tensor]:
    """Compute the query and the output projection to and from the latent space."""
    queries = mla.absorb(q, weight, rope_dim=spec.rope_dim)
    return queries, mla.release(seen, weight, v_dim=spec.v_dim)


@given(
    tokens=st.sampled_from([0, 1, 2, 3, 7, 17, 70, 131]),
    heads=st.integers(1, 3),
    rank=st.sampled_from([8, 21, 64, 200, 512]),
    dims=st.sampled_from([(16, 8, 24), (128, 64, 128), (5, 2, 33), (300, 16, 8)]),
    dtype=st.sampled_from([*TOLERANCE]),
    gap=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_per_head_matmuls(
    tokens: int, heads: int, rank: int, dims: tuple[int, int, int], dtype: torch.dtype, gap: int, seed: int
) -> None:
    """Check for weights of another head or part, strides, tails and RoPE dimensions, and batch invariance."""
    torch.manual_seed(seed)
    spec = MLASpec(heads, rank, *dims, scale=1.0)
    weight = (torch.randn(heads, spec.nope_dim + spec.v_dim, rank) / rank**0.5).to(dtype)
    q = torch.randn(tokens, heads * spec.query_dim + gap).to(dtype)
    q = q[:, : heads * spec.query_dim].unflatten(1, (heads, spec.query_dim))
    seen = torch.randn(tokens, heads, spec.width).to(dtype)
    queries, values = both(q, seen, weight, spec)
    near(queries[..., :rank], reference.absorb(q.double(), weight.double(), spec))
    assert torch.equal(queries[..., rank:], q[..., spec.nope_dim :])
    near(values, reference.release(seen[..., :rank].double(), weight.double(), spec))
    before = torch.get_num_threads()
    torch.set_num_threads(3 - before % 2)
    try:
        some = slice(tokens // 2, tokens // 2 + 1)
        for alone, company in zip(both(q[some], seen[some], weight, spec), (queries, values), strict=True):
            assert torch.equal(alone, company[some])
        for second, first in zip(both(q, seen, weight, spec), (queries, values), strict=True):
            assert torch.equal(second, first)
    finally:
        torch.set_num_threads(before)
