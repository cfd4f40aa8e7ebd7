"""Products with weights of 8 bits and a scale for each output, x (scale W)^T.

Few rows of x are multiplied as they are: reading the weight is all the time there is. Many are rounded to 8
bits, each with a scale, where the checkpoint was made for that; else the weight is widened for the library's
product.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.int8 import Codes
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.activations import silu_times
from quire.kernels.triton.launch import MOST_ROWS, follow, launch, overlap
from quire.kernels.triton.matmul import LONGEST, Rows, tiled


class Tiles(NamedTuple):
    """`_tiles` of so many rows of x, rows of the weight and numbers of each at a time."""

    num: int
    rows: int
    length: int
    warps: int
    stages: int


Plan = Rows | Tiles


@triton.jit
def _round(
    codes: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    static: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    STATIC: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (rows of x)."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, LENGTH)
    follow(OVERLAP)
    values = tl.load(x + row * x_stride + k, mask=k < size, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), 0) / 127, 1e-10)
    tl.store(codes + row * size + k, to_code(values / scale), mask=k < size)
    tl.store(scales + row, scale)


@triton.jit
def to_code(x: tl.tensor) -> tl.tensor:
    """The nearest whole number of -127 .. 127."""
    x = tl.clamp(x, -127.0, 127.0)
    return (x + tl.where(x < 0, -0.5, 0.5)).to(tl.int8)


@triton.jit
def _rows(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
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
    exist = n < size_out
    held = exist[:, None] & (k < size_in)[None, :]
    at = weight + n.to(tl.int64)[:, None] * size_in + k[None, :]
    w = tl.load(at, mask=held, other=0, eviction_policy="evict_first")
    scale = tl.load(scales + n, mask=exist, other=0.0)
    if GATED:
        at += size_out.to(tl.int64) * size_in
        up = tl.load(at, mask=held, other=0, eviction_policy="evict_first")
        up_scale = tl.load(scales + size_out + n, mask=exist, other=0.0)
    if BIASED:
        offset = tl.load(bias + n, mask=exist, other=0.0).to(tl.float32)
    follow(OVERLAP)
    kind = out.dtype.element_ty
    for m in tl.static_range(NUM):
        row = tl.load(x + m * x_stride + k, mask=k < size_in, other=0.0).to(tl.float32)[None, :]
        y = tl.sum(w.to(tl.float32) * row, 1) * scale
        if BIASED:
            y += offset
        y = y.to(kind)
        if GATED:
            y = silu_times(y, (tl.sum(up.to(tl.float32) * row, 1) * up_scale).to(kind))
        tl.store(out + m * size_out + n, y, mask=exist)


@triton.jit(do_not_specialize=["num"])
def _tiles(
    out: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    num: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    ROUNDED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (num / NUM * size_out / ROWS). `x` and `weight` are descriptors of tiles.

    The weight is the first factor, which can be widened in registers; sums lie on their side.
    """
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    first_m, first_n = tile % stripes * NUM, tile // stripes * ROWS
    follow(OVERLAP)
    acc = tl.zeros([ROWS, NUM], tl.int32 if ROUNDED else tl.float32)
    up = tl.zeros([ROWS, NUM], tl.int32 if ROUNDED else tl.float32)
    for at in range(0, size_in, LENGTH):
        a = tl.trans(x.load([first_m, at]))
        acc = times(weight.load([first_n, at]), a, acc)
        if GATED:
            up = times(weight.load([first_n + size_out, at]), a, up)
    m, n = first_m + tl.arange(0, NUM), first_n + tl.arange(0, ROWS)
    y = acc.to(tl.float32) * tl.load(scales + n, mask=n < size_out, other=0.0)[:, None]
    if ROUNDED:
        x_scale = tl.load(x_scales + m, mask=m < num, other=0.0)[None, :]
        y *= x_scale
    if BIASED:
        y += tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    y = y.to(kind)
    if GATED:
        other = up.to(tl.float32) * tl.load(scales + size_out + n, mask=n < size_out, other=0.0)[:, None]
        if ROUNDED:
            other *= x_scale
        y = silu_times(y, other.to(kind))
    place = m.to(tl.int64)[:, None] * size_out + n[None, :]
    tl.store(out + place, tl.trans(y), mask=(m < num)[:, None] & (n < size_out)[None, :])


@triton.jit
def times(w: tl.tensor, a: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """Codes times numbers of any type."""
    if acc.dtype == tl.int32:
        return tl.dot(w, a, acc, out_dtype=tl.int32)
    else:
        return tl.dot(w.to(a.dtype), a, acc, input_precision="ieee")


class Product:
    """x W^T + b, and of a gate and an up part silu(gate) * up. `rounds`: many rows of x are rounded, by their
    own scales or by a `static` one."""

    def __init__(
        self, weight: Codes, bias: Tensor | None, *, rounds: bool = False, static: Tensor | None = None
    ) -> None:
        self.weight, self.bias, self.rounds, self.static = weight, bias, rounds, static

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, gated=False)

    def gated(self, x: Tensor) -> Tensor:
        return self._product(x, gated=True)

    def _product(self, x: Tensor, *, gated: bool) -> Tensor:
        size_out, size_in = self.weight.codes.shape
        plan = choose(len(x), size_out, size_in, 1 + gated, self.rounds)
        if plan is None or isinstance(plan, Tiles) and not (aligned(x) and aligned(self.weight.codes)):
            y = F.linear(x, self.weight.widened(x.dtype), self.bias)
            return gated_of(y, "silu") if gated else y
        rounded = self.rounds and len(x) > _FEW
        if rounded:
            return multiply(*round_rows(x, self.static), self.weight, self.bias, plan, x.dtype, gated=gated)
        return multiply(x, None, self.weight, self.bias, plan, x.dtype, gated=gated)


def round_rows(x: Tensor, static: Tensor | None = None) -> Codes:
    """`kernels/int8.py` of the same name."""
    num, size = x.shape
    codes = torch.empty(num, size, dtype=torch.int8, device=x.device)
    scales = torch.empty(num, dtype=torch.float32, device=x.device)
    ahead, length = overlap(num, size), triton.next_power_of_2(size)
    launch(_round, num)(
        codes, scales, x, scales if static is None else static, size, x.stride(0),
        STATIC=static is not None, LENGTH=length, OVERLAP=ahead, launch_pdl=ahead,
        num_warps=min(max(length // 1024, 1), 16),
    )  # fmt: skip
    return Codes(codes, scales)


def multiply(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Codes,
    bias: Tensor | None,
    plan: Plan,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> Tensor:
    """Of codes of x with `x_scales`, or x as it is."""
    codes, scales = weight
    num, size_out, size_in = len(x), len(codes) // (1 + gated), codes.shape[1]
    out = torch.empty(num, size_out, dtype=dtype, device=x.device)
    ahead, biased = overlap(num, min(size_in, size_out)), bias is not None
    offset = out if bias is None else bias
    if isinstance(plan, Rows):
        assert x_scales is None
        launch(_rows, triton.cdiv(size_out, plan.rows))(
            out, x, codes, scales, offset, size_in, size_out, x.stride(0), NUM=num, GATED=gated,
            BIASED=biased, ROWS=plan.rows, LENGTH=triton.next_power_of_2(size_in), OVERLAP=ahead,
            launch_pdl=ahead, num_warps=plan.warps,
        )  # fmt: skip
        return out
    launch(_tiles, triton.cdiv(num, plan.num) * triton.cdiv(size_out, plan.rows))(
        out, tiled(x, plan.num, plan.length), scales if x_scales is None else x_scales,
        tiled(codes, plan.rows, plan.length), scales, offset, num, size_in, size_out,
        ROUNDED=x_scales is not None, GATED=gated, BIASED=biased, NUM=plan.num, ROWS=plan.rows,
        LENGTH=plan.length, OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


def aligned(matrix: Tensor) -> bool:
    """As the copy engine wants it: tiles begin at multiples of 16 bytes."""
    step = matrix.stride(0) * matrix.element_size()
    return step % 16 == 0 and matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0


_FEW = 64
"""So many rows of x are not rounded."""


@functools.cache
def choose(num: int, size_out: int, size_in: int, parts: int, rounds: bool) -> Plan | None:
    """How to multiply `num` rows with a weight of this shape; `parts` is 2 for gate and up. None is the
    library's product."""
    length = triton.next_power_of_2(size_in)
    if num == 0:
        return None
    if num <= 2 and length <= LONGEST and num * length <= 2**14:
        return Rows(max(8192 // length, 1), 8 if length >= 4096 else 4)
    if num <= _FEW or num <= MOST_ROWS and not rounds:
        height = 16 if num <= 16 else 32 if num <= 32 else 64
        return Tiles(height, 64, 128, 4, 4 if parts == 2 else 6)
    if not rounds:
        return None
    return Tiles(128, 128, 128, 8, 3)
