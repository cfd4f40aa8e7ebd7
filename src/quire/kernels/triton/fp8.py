"""GEMM with e4m3 weights, x W^T; the reference is `kernels/reference/fp8.py`.

A single row of x keeps its dtype: programs hold rows of the weight and dequantize them in registers. With
more rows, x is quantized to e4m3, too, with a scale per row or per 128 elements, and the tensor cores
multiply e4m3 operands. Dequantizing the weight for them measured slower than reading it.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.fp8 import BLOCK, E4M3, Scaled
from quire.kernels.reference.fp8 import linear as widened_linear
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.activations import silu_times
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.matmul import RowsPlan, TilesPlan, has_room, tiled
from quire.kernels.triton.tile_dots import LONGEST, arrivals_of, empty, times, upright

_GROUPS = 16
"""Groups of a row of x per program of `_quantize`."""


Plan = RowsPlan | TilesPlan | None
"""GEMM plan; None is the library's GEMM. `TilesPlan` and None take x in e4m3."""


@triton.jit
def _quantize(
    out: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Quantize GROUPS groups of one row, with one scale per `WIDTH` elements or per row. If `GATED`, x is a
    gate and an up part, and silu(gate) * up is quantized. Grid: (rows, groups / GROUPS)."""
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


@triton.jit
def _rows(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    NUM: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCKED: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiply NUM rows of x by ROWS weight rows, which lie in one block, as `_rows` of matmul.py does. Grid:
    (size_out / ROWS,)."""
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    exists = (n < size_out)[:, None] & (k < size_in)[None, :]
    at = weight + n.to(tl.int64)[:, None] * size_in + k[None, :]
    w = tl.load(at, mask=exists, other=0.0, eviction_policy="evict_first")
    outputs = size_out * 2 if GATED else size_out
    by_k, by_n = scales_of(scale, 0, tl.program_id(0) * ROWS, n, k, size_in, outputs, BLOCKED)
    if GATED:
        up = tl.load(
            at + size_out.to(tl.int64) * size_in, mask=exists, other=0.0, eviction_policy="evict_first"
        )
        first = size_out + tl.program_id(0) * ROWS
        up_by_k, up_by_n = scales_of(scale, 0, first, size_out + n, k, size_in, outputs, BLOCKED)
    if BIASED:
        offset = tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)
    follow(OVERLAP)
    for m in tl.static_range(NUM):
        row = tl.load(x + m * x_stride + k, mask=k < size_in, other=0.0).to(tl.float32)
        y = tl.sum(w.to(tl.float32) * (row * by_k)[None, :], 1) * by_n
        if BIASED:
            y += offset
        y = y.to(out.dtype.element_ty)
        if GATED:
            other = tl.sum(up.to(tl.float32) * (row * up_by_k)[None, :], 1) * up_by_n
            y = silu_times(y, other.to(out.dtype.element_ty))
        tl.store(out + m * size_out + n, y, mask=n < size_out)


@triton.jit
def scales_of(
    scale: tl.tensor,
    matrix: tl.tensor,
    first: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    size_in: tl.tensor,
    outputs: tl.tensor,
    BLOCKED: tl.constexpr,
) -> tl.tensor:
    """Return factors along k and along n for weight rows `n`, from `first` on, of a matrix with `outputs`
    rows. Both are 1 for an unquantized matrix (`scale` None)."""
    if scale is None:
        return 1.0, 1.0
    elif BLOCKED:
        at = scale + (matrix * tl.cdiv(outputs, 128) + first // 128) * tl.cdiv(size_in, 128) + k // 128
        return tl.load(at, mask=k < size_in, other=0.0), 1.0
    else:
        return 1.0, tl.load(scale + matrix * outputs + n, mask=n < outputs, other=0.0)


@triton.jit(do_not_specialize=["num"])
def _tiles(
    out: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    num: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCKED: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Compute a tile as `_tiles` of matmul.py does. If `BLOCKED`, a tile of the weight has one scale."""
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    first_m, first_n = tile % stripes * NUM, tile // stripes * ROWS
    share, groups = tl.cdiv(tl.cdiv(size_in, LENGTH), SPLITS) * LENGTH, tl.cdiv(size_in, 128)
    first = tl.program_id(1) * share
    m, n = first_m + tl.arange(0, NUM), first_n + tl.arange(0, ROWS)
    follow(OVERLAP)
    acc, up = empty(NUM, ROWS), empty(NUM, ROWS)
    for at in range(first, tl.minimum(first + share, size_in), LENGTH):
        a = x.load([first_m, at])
        x_factor, block = 1.0, scale + first_n // 128 * groups + at // 128
        if BLOCKED:
            x_factor = along_x(tl.load(x_scale + at // 128 * num + m, mask=m < num, other=0.0), NUM)
        acc = plus(acc, a, weight.load([first_n, at]), x_factor, block, BLOCKED)
        if GATED:
            block += size_out // 128 * groups
            up = plus(up, a, weight.load([first_n + size_out, at]), x_factor, block, BLOCKED)
    acc, up = upright(acc, NUM), upright(up, NUM)
    inside = (m < num)[:, None] & (n < size_out)[None, :]
    place = m[:, None] * size_out + n[None, :]
    if SPLITS > 1:
        tl.store(parts + tl.program_id(1) * num * size_out + place, acc, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1) < SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = tl.zeros([NUM, ROWS], tl.float32)
        for split in tl.static_range(SPLITS):
            acc += tl.load(
                parts + split * num * size_out + place, mask=inside, other=0.0, cache_modifier=".cg"
            )
    acc = _apply_scales(acc, x_scale, scale, m, n, num, size_out, BLOCKED)
    if BIASED:
        acc += tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out.dtype.element_ty)
    if GATED:
        up = _apply_scales(up, x_scale, scale + size_out, m, n, num, size_out, BLOCKED)
        y = silu_times(y, up.to(out.dtype.element_ty))
    tl.store(out + place, y, mask=inside)


@triton.jit
def _apply_scales(
    acc: tl.tensor,
    x_scale: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    num: tl.tensor,
    size_out: tl.tensor,
    BLOCKED: tl.constexpr,
) -> tl.tensor:
    """Apply the scales of rows and outputs; blocked scales were applied in the loop."""
    if not BLOCKED:
        acc *= tl.load(x_scale + m, mask=m < num, other=0.0)[:, None]
        acc *= tl.load(scale + n, mask=n < size_out, other=0.0)[None, :]
    return acc


@triton.jit
def plus(
    acc: tl.tensor, x: tl.tensor, w: tl.tensor, x_factor: tl.tensor, scale: tl.tensor, BLOCKED: tl.constexpr
) -> tl.tensor:
    """Return acc + x w^T; if `BLOCKED`, x w^T is multiplied by `x_factor` and the weight's scale of this
    block."""
    if BLOCKED:
        return acc + times(x, w, tl.zeros_like(acc)) * (x_factor * tl.load(scale))
    else:
        return times(x, w, acc)


@triton.jit
def along_x(factor: tl.tensor, NUM: tl.constexpr) -> tl.tensor:
    """Broadcast factors of rows of x to sums that are not yet `upright`."""
    return factor[None, :] if NUM < 64 else factor[:, None]


def quantize(x: Tensor, *, grouped: bool, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Return x [T, n] in e4m3 and its scales: [T], or [T, n / 128] if `grouped`, contiguous along T. If
    `gated`, silu(gate) * up of x [T, 2n] is quantized."""
    num, size = len(x), x.shape[1] // (1 + gated)
    out = torch.empty(num, size, dtype=E4M3, device=x.device)
    width = BLOCK if grouped else triton.next_power_of_2(size)
    groups, at_once = triton.cdiv(size, width), _GROUPS if grouped else 1
    scales = torch.empty(groups, num, dtype=torch.float32, device=x.device)
    if num:
        ahead = overlap(num, size)
        launch(_quantize, num, triton.cdiv(groups, at_once))(
            out, scales, x, size, x.stride(0), GATED=gated, GROUPS=at_once, WIDTH=width, OVERLAP=ahead,
            launch_pdl=ahead, num_warps=4 if width <= 4096 else 16,
        )  # fmt: skip
    return out, scales.t() if grouped else scales[0]


def linear(x: Tensor, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x [M, K] and W [N, K]."""
    return _linear(x, weight, bias, gated=False)


def gated(x: Tensor, weight: Scaled) -> Tensor:
    """Return silu(x G^T) * (x U^T) for x [M, K] and W = G over U [2N, K]."""
    return _linear(x, weight, None, gated=True)


def _linear(x: Tensor, weight: Scaled, bias: Tensor | None, *, gated: bool) -> Tensor:
    size_out, size_in = weight.data.shape
    if x.element_size() != 2 or size_in % 16 or not len(x):
        y = widened_linear(x, weight, bias)
        return gated_of(y, "silu") if gated else y
    plan = choose(len(x), size_out, size_in, 1 + gated, weight.is_blocked)
    if gated and plan is None:
        return gated_of(multiply(x, weight, bias, plan), "silu")
    return multiply(x, weight, bias, plan, gated=gated)


@functools.cache
def is_native() -> bool:
    """Whether the kernels run. Ada has e4m3 tensor cores; the tiles need the shared memory of Hopper."""
    return torch.cuda.get_device_capability() >= (9, 0) and has_room()


def gated_linear(x: Tensor, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """Return `linear` of silu(gate) * up for x [M, 2K], a gate and an up part. The activation is only stored
    in e4m3. Rows have at least 16 elements."""
    narrow, scale = quantize(x, grouped=weight.is_blocked, gated=True)
    plan = choose(max(len(x), 2), *weight.data.shape, 1, weight.is_blocked)
    return _multiply_narrow(narrow, scale, weight, bias, plan, x.dtype)


def multiply(x: Tensor, weight: Scaled, bias: Tensor | None, plan: Plan, *, gated: bool = False) -> Tensor:
    """Multiply by a plan. The library's GEMM (plan None) does not apply the gate."""
    if not isinstance(plan, RowsPlan):
        narrow, scale = quantize(x, grouped=weight.is_blocked)
        return _multiply_narrow(narrow, scale, weight, bias, plan, x.dtype, gated=gated)
    num, size_out, size_in = len(x), len(weight.data) // (1 + gated), weight.data.shape[1]
    ahead, biased = overlap(num, min(size_in, size_out)), bias is not None
    out = torch.empty(num, size_out, dtype=x.dtype, device=x.device)
    launch(_rows, triton.cdiv(size_out, plan.rows))(
        out, x, *weight, bias if biased else out, size_in, size_out, x.stride(0), NUM=num, GATED=gated,
        BIASED=biased, BLOCKED=weight.is_blocked, ROWS=plan.rows, LENGTH=triton.next_power_of_2(size_in),
        OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps,
    )  # fmt: skip
    return out


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
    """Multiply an x in e4m3."""
    if not isinstance(plan, TilesPlan):
        return _library_gemm(x, x_scale, weight, bias, dtype)
    data, scale = weight
    num, size_out, size_in = len(x), len(data) // (1 + gated), data.shape[1]
    ahead, biased = overlap(num, min(size_in, size_out)), bias is not None
    out = torch.empty(num, size_out, dtype=dtype, device=x.device)
    parts = out
    if plan.splits > 1:
        parts = torch.empty(plan.splits * num * size_out, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num, plan.num) * triton.cdiv(size_out, plan.rows)
    launch(_tiles, tiles, plan.splits)(
        out, tiled(x, plan.num, plan.length), x_scale, tiled(data, plan.rows, plan.length), scale,
        bias if biased else out, parts, arrivals_of(x.device), num, size_in, size_out, GATED=gated,
        BIASED=biased, BLOCKED=weight.is_blocked, NUM=plan.num, ROWS=plan.rows, LENGTH=plan.length,
        SPLITS=plan.splits, OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


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
    """Tiles for up to `most` rows: for few outputs, many outputs, long rows (many inputs), and gate with
    up."""

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
"""Plan for more rows where the library does not support the shape."""


@functools.cache
def choose(num: int, size_out: int, size_in: int, parts: int, blocked: bool) -> Plan:
    """Return the plan for `num` rows and a weight of this shape; `parts` is 2 for gate and up.

    The plans were measured on an H200 in CUDA graphs of GEMMs with different weights; see
    docs/evidence/quantization.md.
    """
    length = triton.next_power_of_2(size_in)
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
