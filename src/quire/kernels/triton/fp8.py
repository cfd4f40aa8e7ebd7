"""GEMM with e4m3 weights, x W^T; the reference is `kernels/reference/fp8.py`.

A single row of x keeps its dtype: programs hold rows of the weight and dequantize them in registers. With
more rows, x is quantized to e4m3, too, with a scale per row or per 128 elements, and the tensor cores
multiply e4m3 operands. In measurements, dequantizing the weight for tensor cores took longer than reading it.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import batch_invariant
from quire.kernels.reference.fp8 import BLOCK, E4M3, Scaled, dequantize
from quire.kernels.triton import matmul
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.activations import silu_times
from quire.kernels.triton.launch import cdiv, follow, launch, next_power_of_2, overlap
from quire.kernels.triton.matmul import RowsPlan, TilesPlan, has_room
from quire.kernels.triton.tile_dots import LONGEST

_GROUPS = 16
"""Groups of a row of x per program of `_quantize`."""


Plan = RowsPlan | TilesPlan | None
"""Plan of a GEMM. None selects the library's GEMM. With `TilesPlan` and None, x is quantized to e4m3."""


@triton.jit
def _quantize(
    out: tl.tensor, scales: tl.tensor, x: tl.tensor, size: tl.tensor, stride: tl.tensor,
    GATED: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Quantize GROUPS groups of a row of x, with one scale per `WIDTH` elements (or the row). If `GATED`, a
    row is a gate and an up part, and silu(gate) * up is quantized. Grid: (rows, groups / GROUPS)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    follow(OVERLAP)
    values = tl.load(x + row * stride + at, mask=at < size, other=0.0)
    if GATED:
        values = silu_times(values, tl.load(x + row * stride + size + at, mask=at < size, other=0.0))
    wide = values.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(wide), 1), 1e-10)
    narrow = tl.clamp(wide * (448.0 / most)[:, None], -448.0, 448.0)
    tl.store(out + row * size + at, narrow.to(out.dtype.element_ty), mask=at < size)
    tl.store(scales + group * tl.num_programs(0) + row, most / 448.0, mask=group * WIDTH < size)


def quantize(x: Tensor, *, grouped: bool, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Return x [T, n] in e4m3 and its scales: [T], or [T, n / 128] if `grouped`, contiguous along T. If
    `gated`, silu(gate) * up of x [T, 2n] is quantized."""
    num, size = len(x), x.shape[1] // (1 + gated)
    out = torch.empty(num, size, dtype=E4M3, device=x.device)
    width = BLOCK if grouped else next_power_of_2(size)
    groups, at_once = cdiv(size, width), _GROUPS if grouped else 1
    scales = torch.empty(groups, num, dtype=torch.float32, device=x.device)
    if num:
        ahead = overlap(num, size)
        launch(_quantize, num, cdiv(groups, at_once))(
            out, scales, x, size, x.stride(0), GATED=gated, GROUPS=at_once, WIDTH=width, OVERLAP=ahead,
            launch_pdl=ahead, num_warps=4 if width <= 4096 else 16,
        )  # fmt: skip
    return out, scales.t() if grouped else scales[0]


def linear(x: Tensor, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x [M, K] and W [N, K]."""
    return _linear(x, weight, bias, gated=False)


def gated(x: Tensor, weight: Scaled) -> Tensor:
    """Return silu(x G^T) * (x U^T) for x [M, K]; the weight [2N, K] has the rows of G, then those of U."""
    return _linear(x, weight, None, gated=True)


def _linear(x: Tensor, weight: Scaled, bias: Tensor | None, *, gated: bool) -> Tensor:
    size_out, size_in = weight.data.shape
    if x.element_size() != 2 or size_in % 16 or not len(x):
        y = matmul.library_linear(x, dequantize(weight, x.dtype), bias)
        return gated_of(y, "silu") if gated else y
    plan = _plan(len(x), size_out, size_in, 1 + gated, weight.is_blocked)
    if gated and plan is None:
        return gated_of(multiply(x, weight, bias, plan), "silu")
    return multiply(x, weight, bias, plan, gated=gated)


@functools.cache
def is_native() -> bool:
    """Whether the GPU can run the kernels of this module. Ada has e4m3 tensor cores, too, but the tiles need
    the shared memory of Hopper."""
    return torch.cuda.get_device_capability() >= (9, 0) and has_room()


def gated_linear(x: Tensor, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """Return y W^T + b for W [N, K] and y = silu(gate) * up [M, K], where x [M, 2K] is gate and up side by
    side. y is stored only in e4m3. M is at least 16."""
    narrow, scale = quantize(x, grouped=weight.is_blocked, gated=True)
    size_out, size_in = weight.data.shape
    plan = _plan(max(len(x), 2), size_out, size_in, 1, weight.is_blocked)
    return _multiply_narrow(narrow, scale, weight, bias, plan, x.dtype)


def multiply(x: Tensor, weight: Scaled, bias: Tensor | None, plan: Plan, *, gated: bool = False) -> Tensor:
    """Compute `linear`, or the function `gated` if `gated`, with the kernel of `plan`. With a plan of None,
    the gate is not applied: the result is the gate and up projections."""
    if not isinstance(plan, RowsPlan):
        narrow, scale = quantize(x, grouped=weight.is_blocked)
        return _multiply_narrow(narrow, scale, weight, bias, plan, x.dtype, gated=gated)
    data, scale = weight
    return matmul.multiply(x, data, bias, plan, gated=gated, scale=scale, blocked=weight.is_blocked)


def _multiply_narrow(
    x: Tensor,
    x_scale: Tensor,
    weight: Scaled,
    bias: Tensor | None,
    plan: Plan,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> Tensor:
    """Compute `multiply` for x that is already in e4m3, with its scales `x_scale`. The output has the dtype
    `dtype`."""
    if not isinstance(plan, TilesPlan):
        return _library_gemm(x, x_scale, weight, bias, dtype)
    data, scale = weight
    return matmul.multiply(
        x, data, bias, plan, gated=gated, x_scale=x_scale, scale=scale, blocked=weight.is_blocked, dtype=dtype
    )


def _library_gemm(
    x: Tensor, x_scale: Tensor, weight: Scaled, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if weight.is_blocked:
        y = torch._scaled_mm(x, weight.data.t(), scale_a=x_scale, scale_b=weight.scale.t(), out_dtype=dtype)
        return y if bias is None else y.add_(bias)
    return torch._scaled_mm(
        x, weight.data.t(), scale_a=x_scale[:, None], scale_b=weight.scale[None, :], bias=bias,
        out_dtype=dtype, use_fast_accum=True,
    )  # fmt: skip


class _Shape(NamedTuple):
    """Plans for up to `most` rows of x, by weight: few outputs, many outputs, long rows (many inputs), and
    gate with up."""

    most: int
    few: TilesPlan
    many: TilesPlan
    long: TilesPlan
    both: TilesPlan


_SHAPES = [
    _Shape(16, TilesPlan(16, 64, 256, 1, 4, 5), TilesPlan(16, 64, 256, 1, 4, 5),
           TilesPlan(16, 64, 256, 2, 4, 6), TilesPlan(16, 128, 256, 1, 8, 3)),
    _Shape(32, TilesPlan(32, 64, 256, 1, 4, 5), TilesPlan(32, 64, 256, 1, 4, 5),
           TilesPlan(32, 64, 256, 2, 4, 4), TilesPlan(32, 128, 256, 1, 8, 3)),
    _Shape(64, TilesPlan(64, 64, 256, 1, 4, 5), TilesPlan(64, 64, 256, 1, 4, 5),
           TilesPlan(64, 64, 256, 2, 4, 4), TilesPlan(64, 64, 128, 1, 4, 4)),
    _Shape(128, TilesPlan(64, 64, 256, 1, 4, 4), TilesPlan(64, 128, 256, 1, 4, 4),
           TilesPlan(128, 64, 128, 2, 4, 6), TilesPlan(128, 128, 128, 1, 8, 4)),
    _Shape(256, TilesPlan(64, 128, 256, 1, 4, 4), TilesPlan(128, 128, 128, 1, 8, 5),
           TilesPlan(64, 128, 256, 1, 4, 4), TilesPlan(128, 128, 128, 1, 8, 4)),
]  # fmt: skip
_SHAPES_OF_BLOCKS = [
    _Shape(16, TilesPlan(16, 64, 128, 2, 4, 6), TilesPlan(16, 64, 128, 2, 4, 6),
           TilesPlan(16, 64, 128, 4, 4, 5), TilesPlan(16, 128, 128, 1, 4, 4)),
    _Shape(32, TilesPlan(32, 64, 128, 2, 4, 6), TilesPlan(32, 64, 128, 2, 4, 6),
           TilesPlan(32, 64, 128, 4, 4, 5), TilesPlan(32, 128, 128, 1, 4, 4)),
    _Shape(256, TilesPlan(64, 64, 128, 2, 4, 5), TilesPlan(64, 64, 128, 1, 4, 5),
           TilesPlan(64, 64, 128, 2, 4, 5), TilesPlan(128, 128, 128, 1, 8, 4)),
]  # fmt: skip
_REST = TilesPlan(128, 128, 128, 1, 8, 4)
"""Plan for more rows of x than `_SHAPES` covers, if the library does not support the shape of the weight."""


def _plan(num: int, size_out: int, size_in: int, parts: int, blocked: bool) -> Plan:
    """Return the plan of `choose`. In the batch-invariant mode, return tiles without split-K for any number
    of rows."""
    if not batch_invariant.is_on():
        return choose(num, size_out, size_in, parts, blocked)
    plan = choose(max(num, 2), size_out, size_in, parts, blocked)
    return plan._replace(splits=1) if isinstance(plan, TilesPlan) else _REST


@functools.cache
def choose(num: int, size_out: int, size_in: int, parts: int, blocked: bool) -> Plan:
    """Return the plan for `num` rows and a weight of this shape; `parts` is 2 for gate and up.

    The plans were measured on an H200 in CUDA graphs of GEMMs with different weights; see
    docs/evidence/quantization.md.
    """
    length = next_power_of_2(size_in)
    if num == 1 and length <= LONGEST:
        rows = 2 if parts == 2 else 8 if size_out <= 4096 >= length else 4
        return RowsPlan(min(max(rows, 8192 // length), 16), 4)
    for shape in _SHAPES_OF_BLOCKS if blocked else _SHAPES:
        if num <= shape.most:
            if parts == 2:
                return shape.both
            return shape.long if size_in > 8192 else shape.many if size_out > 4096 else shape.few
    unit = BLOCK if blocked else 16
    return _REST if size_out % unit or size_in % unit else None
