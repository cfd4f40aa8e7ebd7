"""GEMM of the batch-invariant mode for any matrices.

The sums over K have one order for any number of rows, whereas a library selects its algorithm by that number.
Weights with aligned rows use the faster tiles of `matmul.py`."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import cdiv, launch

_ROWS, _COLUMNS = 64, 64
"""Rows and columns of a tile of `_multiply`."""


@triton.jit(do_not_specialize=["num", "size_out"])
def _multiply(
    out: tl.tensor, a: tl.tensor, b: tl.tensor, bias: tl.tensor, num: tl.tensor, size_in: tl.tensor,
    size_out: tl.tensor, a_strides: tl.tuple, b_strides: tl.tuple, out_strides: tl.tuple,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of the product a b + bias of matrices with any strides; the bias is per column. Grid:
    (tiles, batch)."""
    stripes = tl.cdiv(num, ROWS)
    m = tl.program_id(0) % stripes * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // stripes * COLUMNS + tl.arange(0, COLUMNS)
    matrix, k = tl.program_id(1).to(tl.int64), tl.arange(0, LENGTH)
    rows, columns = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    left_rows = a + matrix * a_strides[0] + rows * a_strides[1]
    right_columns = b + matrix * b_strides[0] + columns * b_strides[2]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, size_in, LENGTH):
        inside, depth = at + k < size_in, (at + k).to(tl.int64)
        left = tl.load(
            left_rows + depth[None, :] * a_strides[2], mask=(m < num)[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            right_columns + depth[:, None] * b_strides[1],
            mask=inside[:, None] & (n < size_out)[None, :],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)[None, :]
    place = matrix * out_strides[0] + rows * out_strides[1] + columns * out_strides[2]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(m < num)[:, None] & (n < size_out)[None, :])


def fixed_bmm(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """Write a b + bias to `out` [batch, M, N] for a [batch, M, K], b [batch, K, N] and a bias [N]."""
    batch, num, size_in = a.shape
    size_out = b.shape[2]
    if b.shape[:2] != (batch, size_in) or out.shape != (batch, num, size_out):
        raise ValueError(f"matrices of shapes {a.shape} and {b.shape} have no product of shape {out.shape}")
    if out.numel():
        launch(_multiply, cdiv(num, _ROWS) * cdiv(size_out, _COLUMNS), batch)(
            out, a, b, None if bias is None else bias.contiguous(), num, size_in, size_out, a.stride(),
            b.stride(), out.stride(), ROWS=_ROWS, COLUMNS=_COLUMNS,
            LENGTH=32 if a.dtype == torch.float32 else 64, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b [..., N] for x [..., K], W [N, K] and b [N]."""
    (size_out, size_in), num = weight.shape, math.prod(x.shape[:-1])
    out = x.new_empty(1, num, size_out)
    return fixed_bmm(x.reshape(1, num, size_in), weight.t()[None], out, bias).view(*x.shape[:-1], size_out)
