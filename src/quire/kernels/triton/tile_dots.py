"""Helpers of tiled GEMM kernels: operand order on the tensor cores, and split-K reduction."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 16384
"""Largest weight row, in elements, that a program can hold."""


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
    """Return the sum of a tile's split-K parts, added in order."""
    total = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * stride, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@functools.cache
def arrivals_of(device: torch.device) -> Tensor:
    """Return the arrival counters of split-K GEMMs; only one GEMM at a time may use them."""
    return torch.zeros(2**16, dtype=torch.int32, device=device)
