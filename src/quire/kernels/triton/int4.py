"""GEMM with 4-bit or 8-bit weights that have a scale and a zero per group of inputs (GPTQ, AWQ).

Codes have the layout of packed GGUF weights (`gguf_layout.py`), and the same kernels multiply them. With very
many rows of x, the weight is unpacked first.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels import batch_invariant
from quire.kernels.triton import gguf_rows, gguf_tiles
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.gguf_decode import Bits, DecodeForm, offset_of
from quire.kernels.triton.gguf_layout import Kind, in_bits, placed
from quire.kernels.triton.gguf_plans import choose
from quire.kernels.triton.gguf_rows import WholeRows
from quire.kernels.triton.gguf_tiles import halves
from quire.kernels.triton.launch import launch, overlap
from quire.kernels.triton.matmul import TilesPlan, aligned, has_room, library_linear, tiled
from quire.kernels.triton.tile_dots import arrivals_of

_UNPACKED_ROWS, _UNPACKED_UNITS = 64, 4


class GroupedWeight(NamedTuple):
    """Quantized weight [size_out, size_in] in the layout of the kernels."""

    codes: Tensor
    """[size_out, units, 4] int32: `gguf_layout.Planes.low`, with padded inputs"""
    heads: Tensor
    """[groups, size_out] int32: the scale in the upper 16 bits and the zero plus `offset` in the lower 16,
    both in the dtype of x."""
    bits: int
    group: int
    size_in: int


def offset(bits: int, dtype: torch.dtype) -> int:
    """Return the offset that a code of `bits` bits has while its bits are in the mantissa of a float of
    `dtype`. `pack` adds it to zero points, too, so that it cancels in code - zero."""
    return int(offset_of(bits, dtype == torch.float16))


def unit_of(bits: int) -> int:
    """Return the number of inputs whose codes fill 4 words of 32 bits."""
    return 128 // bits


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, *, bits: int, dtype: torch.dtype) -> GroupedWeight:
    """Pack a weight with `codes` [size_out, size_in] uint8, and `scales` and `zeros` [size_out, groups]."""
    (size_out, size_in), unit = codes.shape, unit_of(bits)
    padded = triton.cdiv(size_in, unit) * unit
    group = padded if scales.shape[1] == 1 else size_in // scales.shape[1]
    flat = placed(F.pad(codes, (0, padded - size_in)), Kind(0, 0, bits, 0, unit))
    words = in_bits(flat, bits).view(torch.int32).view(size_out, -1, 4)
    heads = (
        (float_bits(scales, dtype) << 16 | float_bits(zeros + offset(bits, dtype), dtype)).t().contiguous()
    )
    return GroupedWeight(words, heads, bits, group, size_in)


def float_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of each value as a 16-bit float of type `dtype`, in an int32."""
    return values.to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF


@triton.jit
def _unpack(
    out: tl.tensor, halves: tl.tensor, bits: tl.tuple, size_in: tl.tensor, size_out: tl.tensor,
    units: tl.tensor,
    FORM: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
) -> None:  # fmt: skip
    """Dequantize a tile of the weight. Grid: (size_out / ROWS, units / UNITS)."""
    kind: tl.constexpr = out.dtype.element_ty
    n, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * UNITS
    word = at * 8 + tl.arange(0, UNITS * 8)
    exists = (n < size_out)[:, None] & (word < units * 8)[None, :]
    words = tl.load(halves + n.to(tl.int64)[:, None] * (units * 8) + word[None, :], mask=exists, other=0)
    pair = gguf_tiles.pairs_of(bits, n, at, n < size_out, units, size_out, FORM, kind, UNITS)
    k = at * FORM.unit + tl.arange(0, UNITS * FORM.unit)
    inside = (n < size_out)[:, None] & (k < size_in)[None, :]
    values = gguf_tiles.numbers_of(words, words, pair, FORM, kind)
    tl.store(out + n.to(tl.int64)[:, None] * size_in + k[None, :], values, mask=inside)


def linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x [M, K]."""
    plan = _plan(x, weight, 1)
    if plan is None:
        return library_linear(x, unpack(weight, x.dtype), bias)
    return multiply(x, weight, bias, plan)


def gated(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Return silu(x G^T) * (x U^T) for x [M, K]; the weight [2N, K] has the rows of G, then those of U."""
    plan = _plan(x, weight, 2)
    if plan is None:
        return gated_of(linear(x, weight), "silu")
    return multiply(x, weight, None, plan, gated=True)


def multiply(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, plan: WholeRows | TilesPlan, *, gated: bool = False
) -> Tensor:
    num, size_out = len(x), len(weight.codes) // (1 + gated)
    x = x if aligned(x) or isinstance(plan, WholeRows) else x.clone(memory_format=torch.contiguous_format)
    out = torch.empty(num, size_out, dtype=x.dtype, device=x.device)
    form, bits, units = _form_of(weight.bits, weight.group), _planes_of(weight), weight.codes.shape[1]
    ahead, activation = overlap(num, min(weight.size_in, size_out)), "silu" if gated else ""
    consts = {"FORM": form, "ACTIVATION": activation, "BIASED": bias is not None, "TOP": 0, "OVERLAP": ahead}
    if isinstance(plan, WholeRows):
        units_held = max(triton.next_power_of_2(units), 32 * plan.warps)
        launch(gguf_rows.rows, gguf_rows.programs(size_out, plan, gated=gated), num)(
            out, x, bits, out if bias is None else bias, out, weight.size_in, size_out, x.stride(0), size_out,
            TWO=plan.two or gated, UNITS=units_held, launch_pdl=ahead, num_warps=plan.warps, **consts,
        )  # fmt: skip
        return out
    parts = out
    if plan.splits > 1:
        parts = torch.empty((1 + gated) * plan.splits * num * size_out, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(num, plan.num) * triton.cdiv(size_out, plan.rows)
    codes = halves(weight.codes, plan.rows, plan.length // form.unit)
    launch(gguf_tiles.tiles, grid, plan.splits)(
        out, tiled(x, plan.num, plan.length), codes, codes, bits, out if bias is None else bias,
        (parts, arrivals_of(x.device)), (out, out), num, units * form.unit, size_out, x.stride(0), size_out,
        NUM=plan.num, ROWS=plan.rows, UNITS=plan.length // form.unit,
        SPLITS=plan.splits, launch_pdl=ahead, num_warps=plan.warps, num_stages=plan.stages, **consts,
    )  # fmt: skip
    return out


def unpack(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [size_out, size_in]."""
    size_out, units = weight.codes.shape[:2]
    out = torch.empty(size_out, weight.size_in, dtype=dtype, device=weight.codes.device)
    launch(_unpack, triton.cdiv(size_out, _UNPACKED_ROWS), triton.cdiv(units, _UNPACKED_UNITS))(
        out, weight.codes.view(torch.int16), _planes_of(weight), weight.size_in, size_out, units,
        FORM=_form_of(weight.bits, weight.group), ROWS=_UNPACKED_ROWS, UNITS=_UNPACKED_UNITS,
    )  # fmt: skip
    return out


@functools.cache
def _form_of(bits: int, group: int) -> DecodeForm:
    return DecodeForm(bits, 0, unit_of(bits), 4, 0, lows=False, subs="", book="", reach=1, group=group)


def _planes_of(weight: GroupedWeight) -> Bits:
    return Bits(weight.codes, weight.codes, weight.codes, weight.heads, weight.codes)


def _plan(x: Tensor, weight: GroupedWeight, parts: int) -> WholeRows | TilesPlan | None:
    """Return the plan of the GEMM of x with `weight`, where `parts` is 2 for gate and up. With None, the
    weight is unpacked for the library's GEMM."""
    fixed = batch_invariant.is_on()
    plan = choose(len(x), len(weight.codes), weight.size_in, parts, unit_of(weight.bits), fixed=fixed)
    if isinstance(plan, WholeRows):
        return plan if x.stride(1) == 1 and weight.size_in % unit_of(weight.bits) == 0 else None
    return plan if plan is not None and (fixed or aligned(x)) and has_room() else None
