"""GEMM with int8 weights and a scale per output, x (scale W)^T.

One or two rows of x keep their dtype. More rows are quantized to int8 with a scale per row. If the checkpoint
was made for int8 activations, many rows are quantized in one part. Else x is quantized in two parts, the
second for the remainder of the first, which is finer than bfloat16; this costs no time while the GEMM is
bound by weight reads. Beyond that, the weight is dequantized for the library's GEMM. (Dequantizing tiles of
the weight in registers measured slower than all of these.)
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import batch_invariant
from quire.kernels.reference.int8 import Int8Codes
from quire.kernels.triton import matmul
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.activations import silu_times
from quire.kernels.triton.launch import cdiv, follow, launch, next_power_of_2, overlap
from quire.kernels.triton.matmul import RowsPlan, has_room, tiled
from quire.kernels.triton.tile_dots import LONGEST


class Int8TilesPlan(NamedTuple):
    """Plan for `_tiles`: rows of x, weight rows and inputs per tile, with compile options."""

    num: int
    rows: int
    length: int
    warps: int
    stages: int


Plan = RowsPlan | Int8TilesPlan
_FINER: tl.constexpr = tl.constexpr(254)
"""Ratio of the quantization steps of the first and the second part of x."""
_WIDENED = 4096
"""Codes per program of `_widen`."""


@triton.jit
def _quantize(
    codes: tl.tensor, scales: tl.tensor, x: tl.tensor, static: tl.tensor, size: tl.tensor,
    x_stride: tl.tensor,
    STATIC: tl.constexpr, PARTS: tl.constexpr, LENGTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Quantize one row of x, in one or two parts. Grid: (rows of x,)."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, LENGTH)
    follow(OVERLAP)
    values = tl.load(x + row * x_stride + k, mask=k < size, other=0.0).to(tl.float32)
    if STATIC:  # noqa: SIM108
        scale = tl.load(static)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), 0) / 127, 1e-10)
    code = _to_int8(values / scale)
    tl.store(codes + row * size + k, code, mask=k < size)
    if PARTS == 2:
        remainder = _to_int8((values / scale - code.to(tl.float32)) * _FINER)
        tl.store(codes + (tl.num_programs(0) + row) * size + k, remainder, mask=k < size)
    tl.store(scales + row, scale)


@triton.jit
def _to_int8(x: tl.tensor) -> tl.tensor:
    """Round to the nearest integer in -127 .. 127."""
    x = tl.clamp(x, -127.0, 127.0)
    return (x + tl.where(x < 0, -0.5, 0.5)).to(tl.int8)


@triton.jit(do_not_specialize=["num"])
def _tiles(
    out: tl.tensor, x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor,
    num: tl.tensor, size_in: tl.tensor, size_out: tl.tensor,
    PARTS: tl.constexpr, GATED: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of x W^T + b, or of the gated product. `x` and `weight` are descriptors of tiles; the
    rows of the second part of x follow those of the first. The weight is the first operand, so sums are
    transposed. Grid: (num / NUM * size_out / ROWS,)."""
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    first_m, first_n = tile % stripes * NUM, tile // stripes * ROWS
    follow(OVERLAP)
    acc, low = tl.zeros([ROWS, NUM], tl.int32), tl.zeros([ROWS, NUM], tl.int32)
    up, up_low = tl.zeros([ROWS, NUM], tl.int32), tl.zeros([ROWS, NUM], tl.int32)
    for at in range(0, size_in, LENGTH):
        a, w = tl.trans(x.load([first_m, at])), weight.load([first_n, at])
        acc = tl.dot(w, a, acc, out_dtype=tl.int32)
        if GATED:
            v = weight.load([first_n + size_out, at])
            up = tl.dot(v, a, up, out_dtype=tl.int32)
        if PARTS == 2:
            b = tl.trans(x.load([num + first_m, at]))
            low = tl.dot(w, b, low, out_dtype=tl.int32)
            if GATED:
                up_low = tl.dot(v, b, up_low, out_dtype=tl.int32)
    m, n = first_m + tl.arange(0, NUM), first_n + tl.arange(0, ROWS)
    exists = n < size_out
    x_scale = tl.load(x_scales + m, mask=m < num, other=0.0)[None, :]
    y = _combine_parts(acc, low, PARTS) * (tl.load(scales + n, mask=exists, other=0.0)[:, None] * x_scale)
    if bias is not None:
        y += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    y = y.to(kind)
    if GATED:
        scale = tl.load(scales + size_out + n, mask=exists, other=0.0)[:, None] * x_scale
        y = silu_times(y, (_combine_parts(up, up_low, PARTS) * scale).to(kind))
    place = m.to(tl.int64)[:, None] * size_out + n[None, :]
    tl.store(out + place, tl.trans(y), mask=(m < num)[:, None] & exists[None, :])


@triton.jit
def _combine_parts(acc: tl.tensor, low: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    y = acc.to(tl.float32)
    if PARTS == 2:
        y += low.to(tl.float32) / _FINER
    return y


@triton.jit
def _widen(
    out: tl.tensor, codes: tl.tensor, scales: tl.tensor, size: tl.tensor, LENGTH: tl.constexpr
) -> None:
    """Dequantize LENGTH elements of one weight row. Grid: (outputs, size / LENGTH)."""
    n, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * LENGTH + tl.arange(0, LENGTH)
    w = tl.load(codes + n * size + k, mask=k < size, other=0).to(tl.float32) * tl.load(scales + n)
    tl.store(out + n * size + k, w.to(out.dtype.element_ty), mask=k < size)


class Int8GEMM:
    """Linear layer x W^T + b for x [M, K] and W [N, K]. If W has gate rows, then up rows, `gated` returns
    silu(gate) * up. With `rounds`, the checkpoint is made for int8 activations: many rows of x are quantized
    in one part, with a scale per row or the `static` scale."""

    def __init__(
        self, weight: Int8Codes, bias: Tensor | None, *, rounds: bool = False, static: Tensor | None = None
    ) -> None:
        self.weight, self.bias, self.rounds, self.static = weight, bias, rounds, static

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, gated=False)

    def gated(self, x: Tensor) -> Tensor:
        return self._multiply(x, gated=True)

    def _multiply(self, x: Tensor, *, gated: bool) -> Tensor:
        size_out, size_in = self.weight.codes.shape
        plan, parts = choose(len(x), size_in, self.rounds, gated, fixed=batch_invariant.is_on())
        if plan is None:
            y = matmul.library_linear(x, widen(self.weight, x.dtype), self.bias)
            return gated_of(y, "silu") if gated else y
        rounded = round_rows(x, None if parts == 2 else self.static, parts) if parts else None
        return multiply(x, rounded, self.weight, self.bias, plan, gated=gated)


def widen(weight: Int8Codes, dtype: torch.dtype) -> Tensor:
    size_out, size_in = weight.codes.shape
    out = torch.empty(size_out, size_in, dtype=dtype, device=weight.codes.device)
    launch(_widen, size_out, cdiv(size_in, _WIDENED))(out, *weight, size_in, LENGTH=_WIDENED)
    return out


def round_rows(x: Tensor, static: Tensor | None = None, parts: int = 1) -> Int8Codes:
    """Quantize the rows of x [M, K] as in `kernels/reference/int8.py`, to [parts * M, K]. Rows of a second
    part, which is the remainder of the first, follow those of the first."""
    num, size = x.shape
    codes = torch.empty(parts * num, size, dtype=torch.int8, device=x.device)
    scales = torch.empty(num, dtype=torch.float32, device=x.device)
    ahead, length = overlap(num, size), next_power_of_2(size)
    launch(_quantize, num)(
        codes, scales, x, scales if static is None else static, size, x.stride(0),
        STATIC=static is not None, PARTS=parts, LENGTH=length, OVERLAP=ahead, launch_pdl=ahead,
        num_warps=min(max(length // 1024, 1), 16),
    )  # fmt: skip
    return Int8Codes(codes, scales)


def multiply(
    x: Tensor,
    rounded: Int8Codes | None,
    weight: Int8Codes,
    bias: Tensor | None,
    plan: Plan,
    *,
    gated: bool = False,
) -> Tensor:
    """Compute `Int8GEMM` with the kernel of `plan`: a `RowsPlan` multiplies x itself, an `Int8TilesPlan` its
    quantized parts `rounded`."""
    codes, scales = weight
    if isinstance(plan, RowsPlan):
        return matmul.multiply(x, codes, bias, plan, gated=gated, scale=scales)
    num, size_out, size_in = len(x), len(codes) // (1 + gated), codes.shape[1]
    ahead = overlap(num, min(size_in, size_out))
    out = torch.empty(num, size_out, dtype=x.dtype, device=x.device)
    assert rounded is not None
    launch(_tiles, cdiv(num, plan.num) * cdiv(size_out, plan.rows))(
        out, tiled(rounded.codes, plan.num, plan.length), rounded.scales,
        tiled(codes, plan.rows, plan.length), scales, bias, num, size_in, size_out,
        PARTS=len(rounded.codes) // num, GATED=gated, NUM=plan.num, ROWS=plan.rows, LENGTH=plan.length,
        OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


_FEW = 64
"""Maximum rows of x that are quantized in two parts for every checkpoint, because that costs no time."""


@functools.cache
def choose(
    num: int, size_in: int, rounds: bool, gated: bool, *, fixed: bool = False
) -> tuple[Plan | None, int]:
    """Return the plan for `num` rows of x and a weight with `size_in` inputs, and the number of parts of x.
    Plan None is the library's GEMM, also for rows that are not a multiple of 16 bytes. The number of rows may
    change the tiles of a `fixed` plan, as sums of integers are exact, but not the parts."""
    length = next_power_of_2(size_in)
    if fixed and num and not size_in % 16:
        height = 16 if num <= 16 else 32 if num <= 32 else 64
        return Int8TilesPlan(height, 64, 128 if has_room() else 64, 4, 3), 1 if rounds else 2
    if num and num <= 2 and length <= LONGEST:
        return RowsPlan(max(8192 // length, 1), 4 if length <= 4096 else 8), 0
    if not num or size_in % 16 or num > 256 and not rounds:
        return None, 0
    if not has_room():
        return Int8TilesPlan(16 if num <= 16 else 64, 64, 64, 4, 3), 2 if num <= _FEW or not rounds else 1
    if num <= 32:
        return Int8TilesPlan(16 if num <= 16 else 32, 64, 256, 4, 3 if gated else 4), 2
    if num <= _FEW or not rounds:
        return Int8TilesPlan(64, 64, 128, 4, 4), 2
    return Int8TilesPlan(64, 128, 128, 4, 4) if num <= 512 else Int8TilesPlan(128, 128, 128, 8, 3), 1
