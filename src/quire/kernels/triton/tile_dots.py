"""Helpers of GEMM kernels: operand order on the tensor cores, scales of e4m3 weights, split-K reduction."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 16384
"""Maximum elements of a weight row that a program can hold."""


# Tensor cores need 64 rows of the first operand. With fewer rows, x is the second operand and sums are
# transposed.
@triton.jit
def empty(NUM: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    return tl.zeros([ROWS, NUM] if NUM < 64 else [NUM, ROWS], tl.float32)


@triton.jit
def times(x: tl.tensor, w: tl.tensor, acc: tl.tensor) -> tl.tensor:
    if x.shape[0] < 64:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def upright(acc: tl.tensor, NUM: tl.constexpr) -> tl.tensor:
    return tl.trans(acc) if NUM < 64 else acc


@triton.jit
def all_of(at: tl.tensor, inside: tl.tensor, stride: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """Return the sum of the split-K results of a tile, which are `stride` elements apart, added in order."""
    total = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * stride, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def scales_of(
    scale: tl.tensor, matrix: tl.tensor, first: tl.tensor, n: tl.tensor, k: tl.tensor, size_in: tl.tensor,
    outputs: tl.tensor,
    BLOCKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the scales of weight rows `n`, which begin at `first`, as factors per input `k` and per row. The
    matrix has `outputs` rows; if it is not quantized (`scale` is None), both factors are 1."""
    if scale is None:
        return 1.0, 1.0
    elif BLOCKED:
        at = scale + (matrix * tl.cdiv(outputs, 128) + first // 128) * tl.cdiv(size_in, 128) + k // 128
        return tl.load(at, mask=k < size_in, other=0.0), 1.0
    else:
        return 1.0, tl.load(scale + matrix * outputs + n, mask=n < outputs, other=0.0)


@triton.jit
def plus(
    acc: tl.tensor, x: tl.tensor, w: tl.tensor, x_factor: tl.tensor, scale: tl.tensor, BLOCKED: tl.constexpr
) -> tl.tensor:
    """Return acc + x w^T. If `BLOCKED`, x w^T is first multiplied by `x_factor` and by the weight's scale of
    the block, at address `scale`."""
    if BLOCKED:
        return acc + times(x, w, tl.zeros_like(acc)) * (x_factor * tl.load(scale))
    else:
        return times(x, w, acc)


@triton.jit
def along_x(factor: tl.tensor, NUM: tl.constexpr) -> tl.tensor:
    """Return factors of rows of x in the shape that multiplies sums before `upright` transposes them."""
    return factor[None, :] if NUM < 64 else factor[:, None]


@functools.cache
def arrivals_of(device: torch.device) -> Tensor:
    """Return the arrival counters of split-K GEMMs; only one GEMM at a time may use them."""
    return torch.zeros(2**16, dtype=torch.int32, device=device)
