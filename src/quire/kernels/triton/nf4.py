"""GEMM with 4-bit weights that index a table of values (`kernels/reference/nf4.py`).

The weight is dequantized for the library's GEMM. Table lookups inside a GEMM kernel measured slower for any
number of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.nf4 import BLOCK, Halves
from quire.kernels.triton.launch import launch
from quire.kernels.triton.matmul import library_linear

_WIDENED = 1024
"""Bytes per program of `_widen`."""
_B: tl.constexpr = tl.constexpr(BLOCK)


@triton.jit
def _widen(
    out: tl.tensor, codes: tl.tensor, scales: tl.tensor, table: tl.tensor, half: tl.tensor,
    LENGTH: tl.constexpr,
) -> None:  # fmt: skip
    """Dequantize LENGTH bytes, with two 4-bit weights each, of one weight row. Grid: (outputs, half /
    LENGTH)."""
    n, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * LENGTH + tl.arange(0, LENGTH)
    valid = k < half
    w = tl.load(codes + n * half + k, mask=valid, other=0).to(tl.int32)
    at_scale = scales + (n * 2 * half + k) // _B
    low = tl.load(table + (w & 15)) * tl.load(at_scale, mask=valid, other=0.0)
    high = tl.load(table + (w >> 4)) * tl.load(at_scale + half // _B, mask=valid, other=0.0)
    tl.store(out + n * 2 * half + k, low.to(out.dtype.element_ty), mask=valid)
    tl.store(out + n * 2 * half + half + k, high.to(out.dtype.element_ty), mask=valid)


def linear(x: Tensor, weight: Halves, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x [M, K] and W [N, K]."""
    return library_linear(x, widen(weight, x.dtype), bias)


def widen(weight: Halves, dtype: torch.dtype) -> Tensor:
    size_out, half = weight.codes.shape
    out = torch.empty(size_out, 2 * half, dtype=dtype, device=weight.codes.device)
    launch(_widen, size_out, triton.cdiv(half, _WIDENED))(out, *weight, half, LENGTH=_WIDENED)
    return out
