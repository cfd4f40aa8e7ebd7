"""Matrix products of layers without their own kernel: by torch, or by Triton in the batch-invariant mode."""

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels import batch_invariant


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b [..., N] for x [..., K], W [N, K] and b [N]."""
    if not _is_fixed(x, weight):
        return F.linear(x, weight, bias)
    from quire.kernels.triton.fixed_gemm import fixed_linear

    return fixed_linear(x, weight, bias)


def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the products [batch, M, N] of `a` [batch, M, K] and `b` [batch, K, N], which may have any
    strides. They are written to `out` if it is not None."""
    if not _is_fixed(a, b):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    from quire.kernels.triton.fixed_gemm import fixed_bmm

    return fixed_bmm(a, b, a.new_empty(a.shape[0], a.shape[1], b.shape[2]) if out is None else out)


def _is_fixed(a: Tensor, b: Tensor) -> bool:
    """Whether a product of `a` and `b` needs a kernel of the batch-invariant mode. Products of float64 and
    integers, which models do not compute, are always left to torch."""
    return batch_invariant.is_on() and a.is_cuda and a.dtype == b.dtype and a.dtype in _DTYPES


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
