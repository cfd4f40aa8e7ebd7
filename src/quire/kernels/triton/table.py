"""Products with weights of 4 bits that stand for numbers of a table (`kernels/table.py`).

Few rows of x are multiplied while the weight is read; for many the weight is widened for the library's
product.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.table import BLOCK, Halves
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.activations import silu_times
from quire.kernels.triton.int8 import Plan, Tiles, aligned
from quire.kernels.triton.launch import MOST_ROWS, follow, launch, overlap
from quire.kernels.triton.matmul import LONGEST, Rows, tiled

_WIDENED = 1024
"""Bytes that a program of `_widen` reads."""
_B: tl.constexpr = tl.constexpr(BLOCK)


@triton.jit
def _dot(
    w: tl.tensor,
    scale: tl.tensor,
    table: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> tl.tensor:
    """Rows of bytes times a row of x, whose first half is `low`. `scale` is a pair: of its blocks."""
    below = tl.load(table + (w & 15)) * low[None, :]
    above = tl.load(table + (w >> 4)) * high[None, :]
    y = tl.sum(tl.reshape(below, [ROWS, LENGTH // _B, _B]), 2) * scale[0]
    y += tl.sum(tl.reshape(above, [ROWS, LENGTH // _B, _B]), 2) * scale[1]
    return tl.sum(y, 1)


@triton.jit
def _scales(
    scales: tl.tensor,
    n: tl.tensor,
    exist: tl.tensor,
    half: tl.tensor,
    LENGTH: tl.constexpr,
) -> tl.tensor:
    """Of the blocks of both halves of some rows."""
    blocks, b = half // _B, tl.arange(0, LENGTH // _B)
    held = exist[:, None] & (b < blocks)[None, :]
    at = scales + n[:, None] * 2 * blocks + b[None, :]
    return tl.load(at, mask=held, other=0.0), tl.load(at + blocks, mask=held, other=0.0)


@triton.jit
def _rows(
    out: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    bias: tl.tensor,
    half: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    NUM: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (size_out / ROWS). `NUM` rows of x, of 2 `half` columns. If `GATED` the weight is the gate's, then
    the up one's."""
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    exist = n < size_out
    held = exist[:, None] & (k < half)[None, :]
    at = codes + n.to(tl.int64)[:, None] * half + k[None, :]
    w = tl.load(at, mask=held, other=0, eviction_policy="evict_first").to(tl.int32)
    scale = _scales(scales, n, exist, half, LENGTH)
    if GATED:
        at += size_out.to(tl.int64) * half
        up = tl.load(at, mask=held, other=0, eviction_policy="evict_first").to(tl.int32)
        up_scale = _scales(scales, n + size_out, exist, half, LENGTH)
    if BIASED:
        offset = tl.load(bias + n, mask=exist, other=0.0).to(tl.float32)
    follow(OVERLAP)
    kind = out.dtype.element_ty
    for m in tl.static_range(NUM):
        row = x + m * x_stride + k
        low = tl.load(row, mask=k < half, other=0.0).to(tl.float32)
        high = tl.load(row + half, mask=k < half, other=0.0).to(tl.float32)
        y = _dot(w, scale, table, low, high, ROWS, LENGTH)
        if BIASED:
            y += offset
        y = y.to(kind)
        if GATED:
            y = silu_times(y, _dot(up, up_scale, table, low, high, ROWS, LENGTH).to(kind))
        tl.store(out + m * size_out + n, y, mask=exist)


@triton.jit
def _times(
    acc: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    blocks: tl.tensor,
    exist: tl.tensor,
) -> tl.tensor:
    """A tile of bytes times x; `scales` are those of the first half, and of the second `blocks` behind."""
    w = w.to(tl.int32)
    below = tl.load(table + (w & 15)) * tl.load(scales, mask=exist, other=0.0)[:, None]
    acc = tl.dot(below.to(low.dtype), low, acc, input_precision="ieee")
    above = tl.load(table + (w >> 4)) * tl.load(scales + blocks, mask=exist, other=0.0)[:, None]
    return tl.dot(above.to(low.dtype), high, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num"])
def _tiles(
    out: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    bias: tl.tensor,
    num: tl.tensor,
    half: tl.tensor,
    size_out: tl.tensor,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (num / NUM * size_out / ROWS). `x` and `codes` are descriptors of tiles of one block's columns.
    Sums lie on their side."""
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    first_m, first_n = tile % stripes * NUM, tile // stripes * ROWS
    m, n = first_m + tl.arange(0, NUM), first_n + tl.arange(0, ROWS)
    exist, blocks = n < size_out, half // _B
    at_scale = scales + n.to(tl.int64) * 2 * blocks
    follow(OVERLAP)
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for block in range(0, blocks):
        low = tl.trans(x.load([first_m, block * _B]))
        high = tl.trans(x.load([first_m, half + block * _B]))
        w = codes.load([first_n, block * _B])
        acc = _times(acc, w, at_scale + block, table, low, high, blocks, exist)
        if GATED:
            w = codes.load([first_n + size_out, block * _B])
            at_up = at_scale + size_out.to(tl.int64) * 2 * blocks + block
            up = _times(up, w, at_up, table, low, high, blocks, exist)
    if BIASED:
        acc += tl.load(bias + n, mask=exist, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    y = acc.to(kind)
    if GATED:
        y = silu_times(y, up.to(kind))
    place = m.to(tl.int64)[:, None] * size_out + n[None, :]
    tl.store(out + place, tl.trans(y), mask=(m < num)[:, None] & exist[None, :])


@triton.jit
def _widen(
    out: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    half: tl.tensor,
    LENGTH: tl.constexpr,
) -> None:
    """Grid (outputs, half / LENGTH)."""
    n, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * LENGTH + tl.arange(0, LENGTH)
    held = k < half
    w = tl.load(codes + n * half + k, mask=held, other=0).to(tl.int32)
    at_scale = scales + (n * 2 * half + k) // _B
    below = tl.load(table + (w & 15)) * tl.load(at_scale, mask=held, other=0.0)
    above = tl.load(table + (w >> 4)) * tl.load(at_scale + half // _B, mask=held, other=0.0)
    tl.store(out + n * 2 * half + k, below.to(out.dtype.element_ty), mask=held)
    tl.store(out + n * 2 * half + half + k, above.to(out.dtype.element_ty), mask=held)


class Product:
    """x W^T + b, and of a gate and an up part silu(gate) * up."""

    def __init__(self, weight: Halves, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, gated=False)

    def gated(self, x: Tensor) -> Tensor:
        return self._product(x, gated=True)

    def _product(self, x: Tensor, *, gated: bool) -> Tensor:
        plan = choose(len(x), x.shape[1])
        if plan is None or isinstance(plan, Tiles) and not aligned(x):
            y = F.linear(x, widen(self.weight, x.dtype), self.bias)
            return gated_of(y, "silu") if gated else y
        return multiply(x, self.weight, self.bias, plan, gated=gated)


def widen(weight: Halves, dtype: torch.dtype) -> Tensor:
    size_out, half = weight.codes.shape
    out = torch.empty(size_out, 2 * half, dtype=dtype, device=weight.codes.device)
    launch(_widen, size_out, triton.cdiv(half, _WIDENED))(out, *weight, half, LENGTH=_WIDENED)
    return out


def multiply(x: Tensor, weight: Halves, bias: Tensor | None, plan: Plan, *, gated: bool = False) -> Tensor:
    (num, size_in), size_out = x.shape, len(weight.codes) // (1 + gated)
    half, biased = size_in // 2, bias is not None
    out = torch.empty(num, size_out, dtype=x.dtype, device=x.device)
    ahead, offset = overlap(num, min(size_in, size_out)), out if bias is None else bias
    if isinstance(plan, Rows):
        launch(_rows, triton.cdiv(size_out, plan.rows))(
            out, x, *weight, offset, half, size_out, x.stride(0), NUM=num, GATED=gated, BIASED=biased,
            ROWS=plan.rows, LENGTH=triton.next_power_of_2(half), OVERLAP=ahead, launch_pdl=ahead,
            num_warps=plan.warps,
        )  # fmt: skip
        return out
    launch(_tiles, triton.cdiv(num, plan.num) * triton.cdiv(size_out, plan.rows))(
        out, tiled(x, plan.num, BLOCK), tiled(weight.codes, plan.rows, BLOCK), weight.scales, weight.table,
        offset, num, half, size_out, GATED=gated, BIASED=biased, NUM=plan.num, ROWS=plan.rows, OVERLAP=ahead,
        launch_pdl=ahead, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


@functools.cache
def choose(num: int, size_in: int) -> Plan | None:
    """How to multiply `num` rows of so many columns. None is the library's product."""
    length = triton.next_power_of_2(size_in // 2)
    if num == 0 or num > MOST_ROWS:
        return None
    if num <= 2 and length <= LONGEST and num * length <= 2**13:
        return Rows(max(4096 // length, 1), 8 if length >= 4096 else 4)
    return Tiles(16 if num <= 16 else 32 if num <= 32 else 64, 64, BLOCK, 4, 4)
