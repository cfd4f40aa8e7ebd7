"""Products of few rows with a large weight, x W^T, where reading the weight is all the time there is.

`_rows` holds some whole rows of the weight in registers, asked for before the kernel in front has ended.
`_tiles` pads x to the 16 rows of a tensor-core tile. Where they beat the library's product was measured.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.triton.launch import MOST_ROWS, follow, overlap
from quire.kernels.triton.ops import TritonOps, silu_times

_LONGEST = 16384
"""Numbers of a weight's row that `_rows` can hold."""
_silu_mul = TritonOps().silu_mul


class Rows(NamedTuple):
    """`_rows` with so many rows of the weight per program."""

    rows: int
    warps: int


class Tiles(NamedTuple):
    """`_tiles` with so many rows of the weight and so many of their numbers at a time, in `splits` parts."""

    rows: int
    length: int
    splits: int
    warps: int
    stages: int


Plan = Rows | Tiles | None
"""None is the library's product."""


@triton.jit
def _rows(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    NUM: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (size_out / ROWS). `NUM` rows of x. If `GATED` the weight is the gate's, then the up one's."""
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    exists = (n < size_out)[:, None] & (k < size_in)[None, :]
    at = weight + n.to(tl.int64)[:, None] * size_in + k[None, :]
    w = tl.load(at, mask=exists, other=0.0, eviction_policy="evict_first")
    if GATED:
        up = tl.load(
            at + size_out.to(tl.int64) * size_in, mask=exists, other=0.0, eviction_policy="evict_first"
        )
    if BIASED:
        offset = tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)
    follow(OVERLAP)
    for m in tl.static_range(NUM):
        row = tl.load(x + m * x_stride + k, mask=k < size_in, other=0.0).to(tl.float32)[None, :]
        y = tl.sum(w.to(tl.float32) * row, 1)
        if BIASED:
            y += offset
        y = y.to(out.dtype.element_ty)
        if GATED:
            y = silu_times(y, tl.sum(up.to(tl.float32) * row, 1).to(out.dtype.element_ty))
        tl.store(out + m * size_out + n, y, mask=n < size_out)


@triton.jit(do_not_specialize=["num"])
def _tiles(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    num: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (size_out / ROWS, SPLITS). The last split adds them all; `arrivals` is zero before and after."""
    n, m = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 16)
    share = tl.cdiv(tl.cdiv(size_in, LENGTH), SPLITS) * LENGTH
    first = tl.program_id(1) * share
    k = tl.arange(0, LENGTH)
    from_x = x + m[:, None] * x_stride + k[None, :]
    from_w = weight + n.to(tl.int64)[None, :] * size_in + k[:, None]
    follow(OVERLAP)
    acc, up = tl.zeros([16, ROWS], tl.float32), tl.zeros([16, ROWS], tl.float32)
    for at in range(first, tl.minimum(first + share, size_in), LENGTH):
        exists = k < size_in - at
        a = tl.load(from_x + at, mask=(m < num)[:, None] & exists[None, :], other=0.0)
        seen = exists[:, None] & (n < size_out)[None, :]
        acc = tl.dot(a, tl.load(from_w + at, mask=seen, other=0.0), acc)
        if GATED:
            b = tl.load(from_w + size_out.to(tl.int64) * size_in + at, mask=seen, other=0.0)
            up = tl.dot(a, b, up)
    inside = (m < num)[:, None] & (n < size_out)[None, :]
    place = m[:, None] * size_out + n[None, :]
    if SPLITS > 1:
        own = parts + tl.program_id(1) * num * size_out + place
        tl.store(own, acc, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tl.program_id(0), 1) < SPLITS - 1:
            return
        tl.store(arrivals + tl.program_id(0), 0)
        acc = tl.zeros([16, ROWS], tl.float32)
        for split in tl.static_range(SPLITS):
            acc += tl.load(
                parts + split * num * size_out + place, mask=inside, other=0.0, cache_modifier=".cg"
            )
    if BIASED:
        acc += tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out.dtype.element_ty)
    if GATED:
        y = silu_times(y, up.to(out.dtype.element_ty))
    tl.store(out + place, y, mask=inside)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [M, K] and W [N, K]."""
    plan = _plan(len(x), weight, 1) if len(x) <= MOST_ROWS else None
    return F.linear(x, weight, bias) if plan is None else multiply(x, weight, bias, plan)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T) for x [M, K] and W = G over U [2N, K]."""
    plan = _plan(len(x), weight, 2) if len(x) <= MOST_ROWS else None
    return _silu_mul(F.linear(x, weight)) if plan is None else multiply(x, weight, None, plan, gated=True)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Rows | Tiles, *, gated: bool = False
) -> Tensor:
    num, size_out, size_in = len(x), len(weight) // (1 + gated), weight.shape[1]
    out = torch.empty(num, size_out, dtype=x.dtype, device=x.device)
    ahead, biased, grid = overlap(num), bias is not None, triton.cdiv(size_out, plan.rows)
    if isinstance(plan, Rows):
        _rows[(grid,)](
            out, x, weight, bias if biased else out, size_in, size_out, x.stride(0), NUM=num, GATED=gated,
            BIASED=biased, ROWS=plan.rows, LENGTH=triton.next_power_of_2(size_in), OVERLAP=ahead,
            launch_pdl=ahead, num_warps=plan.warps,
        )  # fmt: skip
        return out
    parts = out
    if plan.splits > 1:
        parts = torch.empty(plan.splits * num * size_out, dtype=torch.float32, device=x.device)
    _tiles[(grid, plan.splits)](
        out, x, weight, bias if biased else out, parts, _arrivals(x.device), num, size_in, size_out,
        x.stride(0), GATED=gated, BIASED=biased, ROWS=plan.rows, LENGTH=plan.length, SPLITS=plan.splits,
        OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters of the splits of a product; one product at a time uses them."""
    return torch.zeros(2**16, dtype=torch.int32, device=device)


def _plan(num: int, weight: Tensor, parts: int) -> Plan:
    if weight.dtype not in (torch.bfloat16, torch.float16) or not num:
        return None
    return choose(num, len(weight), weight.shape[1], parts)


@functools.cache
def choose(num: int, size_out: int, size_in: int, parts: int) -> Plan:
    """How to multiply `num` rows with a weight of this shape; `parts` is 2 for gate and up.

    Measured on an H200 in graphs of products with different weights, us of the library / of these:
        rows of x        1            2            4            8           16
        4096 x 1024      5.4 / 3.5    5.4 / 3.8    5.4 / 5.2    5.4 / 5.2    5.4 / 5.5
        1024 x 3072      7.6 / 2.9    7.6 / 3.3    7.6 / 4.5    7.6 / 5.8    7.9 / 6.0
        28672 x 4096    62.9 / 56.9  65.0 / 60.9  62.6 / 59.9  63.0 / 62.2  63.4 / 61.9
    """
    length = triton.next_power_of_2(size_in)
    if num == 1 and length <= _LONGEST:
        return Rows(max(4096 * parts // length, 1), 8)
    if num == 2 and length <= 4096 and size_out < 2**16:
        return Rows(max(8192 // length, 1), 4)
    if num <= 4 and length <= 4096 and size_out <= 1024:
        return Rows(max(8192 // length, 1), 4)
    if size_out >= 2**16:
        return Tiles(64, 128, 1, 4, 4)
    if parts == 2 or size_out > 2**14:
        return Tiles(32, 256, 1, 4, 4) if size_in <= 2048 else Tiles(32, 128, 1, 4, 5)
    splits = min(max(512 // triton.cdiv(size_out, 32), 1), max(size_in // 256, 1))
    return Tiles(32, 128, splits, 4, 5)
