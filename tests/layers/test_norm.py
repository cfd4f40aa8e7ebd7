import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.kernels.reference.ops import Reference
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounds_where_transformers_rounds(dtype: torch.dtype) -> None:
    """The weight applied before rounding, or the mean taken in half precision: a drift in every layer."""
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(32, eps=1e-5).to(dtype)
    theirs.weight.data.copy_(torch.randn(32))
    x = torch.randn(7, 32).to(dtype) * 3
    assert torch.equal(Reference().norm(x, theirs.weight.data, 1e-5), theirs(x))


def test_the_residual_is_added_first_and_handed_on(scope: Scope) -> None:
    norm = RMSNorm(8, 1e-5, scope / "norm")
    norm.weight.copy_(torch.randn(8))
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    expected = x + residual
    y, total = norm(x, residual)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(y, norm(expected, None)[0])
    y, total = norm(x, None)
    torch.testing.assert_close(total, x)
    torch.testing.assert_close(y, Reference().norm(x, norm.weight, 1e-5))
