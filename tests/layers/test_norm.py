import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.kernels.reference.ops import Reference
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounds_where_transformers_rounds(dtype: torch.dtype) -> None:
    """Check that the weight is applied after rounding and the mean is computed in float32."""
    torch.manual_seed(0)
    expected = LlamaRMSNorm(32, eps=1e-5).to(dtype)
    expected.weight.data.copy_(torch.randn(32))
    x = torch.randn(7, 32).to(dtype) * 3
    assert torch.equal(Reference().norm(x, expected.weight.data, 1e-5), expected(x))


def test_residual_is_added_first_and_returned(scope: Scope) -> None:
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
