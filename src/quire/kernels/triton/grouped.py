"""Products with weights of 4 or 8 bits whose groups of inputs have a scale and a zero each.

`_rows` holds some whole rows of the weight in registers, asked for before the kernel in front has ended.
`_tiles` has the weight's codes as the first factor of the tensor cores, which they take out of registers: a
code becomes a number on its way. Of many rows a layer is better unpacked first.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.activations import silu_times
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.matmul import Rows, Tiles, aligned, arrivals_of, has_room, tiled

MOST_TILED = 512
"""More rows are multiplied by the library, with a weight that is unpacked for them."""
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class GroupedWeight(NamedTuple):
    """A weight [size_out, size_in], or one of each expert, as the kernels read it.

    Codes lie in pieces of `16 / bits` runs: the 16 bits of `codes` that are i-th in a piece hold, from the
    lowest on, the i-th code of each run.
    """

    codes: Tensor
    """[size_out, padded size_in * bits / 16] int16; of experts, one's after the other's"""
    heads: Tensor
    """[..., groups, size_out] int32: the scale above the zero, both in the type of x. The zero has what
    `offset` says added to it."""
    bits: int
    group: int
    run: int
    size_in: int

    @property
    def piece(self) -> int:
        """Inputs of a piece."""
        return 16 // self.bits * self.run


def offset(bits: int, dtype: torch.dtype) -> int:
    """What a code has added to it when its bits are put under those of this number."""
    return 1024 if dtype == torch.float16 else 128 if bits == 4 else 0


def run_of(size_in: int, group: int, bits: int) -> int:
    """As long as a group allows, and as divides the inputs, if any does."""
    fitting = [run for run in (64, 32, 16) if group % run == 0 and size_in % (16 // bits * run) == 0]
    return fitting[0] if fitting else 16


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, *, bits: int, dtype: torch.dtype) -> GroupedWeight:
    """`codes` uint8 [out, in], `scales` and `zeros` [out, groups] -> what the kernels read."""
    size_out, size_in = codes.shape
    group = size_in // scales.shape[1]
    run, per = run_of(size_in, group, bits), 16 // bits
    padded = triton.cdiv(size_in, per * run) * per * run
    if scales.shape[1] == 1:
        group = padded
    pieces = F.pad(codes, (0, padded - size_in)).view(size_out, -1, per, run)
    packed = torch.zeros(size_out, padded // (per * run), run, dtype=torch.int32, device=codes.device)
    for i in range(per):
        packed |= pieces[:, :, i].to(torch.int32) << bits * i
    packed = packed.to(torch.int16).view(size_out, -1)
    high = _bits_of(scales, dtype) << 16
    heads = (high | _bits_of(zeros + offset(bits, dtype), dtype)).t()
    heads = F.pad(heads, (0, 0, 0, triton.cdiv(padded, group) - len(heads))).contiguous()
    return GroupedWeight(packed, heads, bits, group, run, size_in)


def stack(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Those of experts, as one: codes [experts * size_out, ...], heads [experts, ...]."""
    codes, heads = torch.cat([each.codes for each in weights]), torch.stack([each.heads for each in weights])
    return weights[0]._replace(codes=codes, heads=heads)


def _bits_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF


def unpack_reference(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """[size_out, size_in] in plain torch."""
    codes, heads, bits, group, run, size_in = weight
    words = codes.to(torch.int32).view(len(codes), -1, 1, run)
    shifts = torch.arange(0, 16, bits, device=codes.device, dtype=torch.int32)[:, None]
    values = (words >> shifts & (1 << bits) - 1).view(len(codes), -1)[:, :size_in]
    scale = (heads >> 16).to(torch.int16).view(dtype).float().repeat_interleave(group, 0)[:size_in].t()
    zero = heads.to(torch.int16).view(dtype).float().repeat_interleave(group, 0)[:size_in].t()
    return ((values - (zero - offset(bits, dtype))) * scale).to(dtype)


@triton.constexpr_function
def _spreading(bits: int, run: int, is_half: bool) -> str:
    """Assembly: of the codes of two words, those in run `run` as two numbers: (code - zero) * scale."""
    kind, under = ("f16x2", "0x64006400") if is_half else ("bf16x2", "0x43004300")
    mask = "0x00ff00ff" if bits == 8 and is_half else "0x000f000f"
    low = f"lop3.b32 t, t, {mask}, {under}, 0xea;"
    if bits == 8 and not is_half:  # 8 bits do not fit under a number: 16 * high + low
        low = (
            f"mov.b32 v, {under}; mov.b32 w, 0x41804180; shr.b32 u, t, 4;"
            f"lop3.b32 u, u, {mask}, {under}, 0xea; sub.{kind} u, u, v; {low} sub.{kind} t, t, v;"
            f"fma.rn.{kind} t, u, w, t;"
        )
    shift, scaled = f"shr.b32 t, $1, {bits * run};", f"sub.{kind} t, t, $2; mul.{kind} $0, t, $4;"
    return f"{{ .reg .b32 t, u, v, w; {shift} {low} {scaled} }}"


@triton.jit
def _doubled(low: tl.tensor) -> tl.tensor:
    """16 bits, and the same above them."""
    return (low & 0xFFFF) | (low << 16)


@triton.jit
def spread(
    words: tl.tensor, heads: tl.tensor, KIND: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr
) -> tl.tensor:
    """Run `RUN` of words [rows, length] with the heads of the rows, as numbers."""
    if _INTERPRETED:
        zero = (heads & 0xFFFF).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)[:, None]
        scale = (heads >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)[:, None]
        base: tl.constexpr = 1024 if tl.float16 == KIND else 128 if BITS == 4 else 0
        code = (words.to(tl.int32) >> BITS * RUN) & ((1 << BITS) - 1)
        return ((code.to(tl.float32) - (zero - base)) * scale).to(KIND)
    else:
        zero = tl.broadcast_to(_doubled(heads)[:, None], words.shape)
        scale = tl.broadcast_to(_doubled(heads >> 16)[:, None], words.shape)
        ASM: tl.constexpr = _spreading(BITS, RUN, tl.float16 == KIND)
        pairs = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r,r,r", [words, zero, scale], dtype=tl.int16, is_pure=True, pack=2
        )
        return pairs.to(KIND, bitcast=True)


@triton.jit
def _sums(
    x: tl.tensor,
    weight: tl.tensor,
    heads: tl.tensor,
    where: tl.tuple,
    steps: tl.tuple,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    LENGTH: tl.constexpr,
) -> tl.tuple:
    """Of a tile's products over steps of `LENGTH` words; [ROWS, NUM], and those of up."""
    RUNS: tl.constexpr = 16 // BITS
    PARTS: tl.constexpr = RUN // LENGTH
    first_m, first_n, size_out, head_stride = where
    n = first_n + tl.arange(0, ROWS)
    exist = n < size_out
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for step in range(steps[0], steps[1]):
        at = step // PARTS * (RUNS * RUN) + step % PARTS * LENGTH
        words = weight.load([first_n, step * LENGTH])
        if GATED:
            up_words = weight.load([first_n + size_out, step * LENGTH])
        for run in tl.static_range(RUNS):
            if run * RUN % GROUP == 0:
                own = heads + (at + run * RUN) // GROUP * head_stride + n
                head = tl.load(own, mask=exist)
                if GATED:
                    up_head = tl.load(own + size_out, mask=exist)
            a = tl.trans(x.load([first_m, at + run * RUN]))
            acc = tl.dot(spread(words, head, KIND, BITS, run), a, acc, input_precision="ieee")
            if GATED:
                up = tl.dot(spread(up_words, up_head, KIND, BITS, run), a, up, input_precision="ieee")
    return acc, up


@triton.jit(do_not_specialize=["num"])
def _tiles(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    heads: tl.tensor,
    bias: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    num: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    head_stride: tl.tensor,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    LENGTH: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (num / NUM * size_out / ROWS, SPLITS). `x` and `weight` are descriptors of tiles, of `LENGTH`.

    The last split adds them all; `arrivals` is zero before and after.
    """
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    first_m, first_n = tile % stripes * NUM, tile // stripes * ROWS
    steps = tl.cdiv(size_in, 16 // BITS * RUN) * (RUN // LENGTH)
    share = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * share
    m, n = first_m + tl.arange(0, NUM), first_n + tl.arange(0, ROWS)
    exist = n < size_out
    kind: tl.constexpr = out.dtype.element_ty
    follow(OVERLAP)
    where, steps = (first_m, first_n, size_out, head_stride), (first, tl.minimum(first + share, steps))
    acc, up = _sums(x, weight, heads, where, steps, kind, GATED, BITS, GROUP, NUM, ROWS, RUN, LENGTH)
    place = m[None, :] * size_out + n[:, None]
    inside = (m < num)[None, :] & exist[:, None]
    if SPLITS > 1:
        tl.store(parts + tl.program_id(1) * num * size_out + place, acc, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1) < SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = tl.zeros([ROWS, NUM], tl.float32)
        for split in tl.static_range(SPLITS):
            at = parts + split * num * size_out + place
            acc += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    if BIASED:
        acc += tl.load(bias + n, mask=exist, other=0.0).to(tl.float32)[:, None]
    y = acc.to(kind)
    if GATED:
        y = silu_times(y, up.to(kind))
    tl.store(out + place, y, mask=inside)


@triton.jit
def _rows(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    heads: tl.tensor,
    bias: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (size_out / ROWS). `NUM` rows of x, in pairs of numbers; so is the weight, in pairs of words."""
    PAIRS: tl.constexpr = RUN // 2
    PIECE: tl.constexpr = 16 // BITS * RUN
    n, piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PIECES)
    pair, quad = tl.arange(0, PAIRS // 4), tl.arange(0, 4)
    within = (piece * PAIRS)[:, None, None] + (pair * 4)[None, :, None] + quad[None, None, :]
    stored = (size_in + PIECE - 1) // PIECE
    known = (n < size_out)[:, None] & (piece < stored)[None, :]
    exist = known[:, :, None, None]
    at = weight + (n.to(tl.int64) * (stored * PAIRS))[:, None, None, None] + within[None, :, :, :]
    words = tl.load(at, mask=exist, other=0, eviction_policy="evict_first")
    own = heads + (piece * PIECE // GROUP * head_stride)[None, :] + n[:, None]
    if GATED:
        at += (size_out * stored).to(tl.int64) * PAIRS
        up_words = tl.load(at, mask=exist, other=0, eviction_policy="evict_first")
    if BIASED:
        shift = tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)
    follow(OVERLAP)
    kind: tl.constexpr = out.dtype.element_ty
    for m in tl.static_range(NUM):
        source = x + m * x_stride
        y = _row(source, words, own, known, within, size_in, head_stride, kind, BITS, GROUP, RUN)
        if BIASED:
            y += shift
        y = y.to(kind)
        if GATED:
            up = _row(
                source, up_words, own + size_out, known, within, size_in, head_stride, kind, BITS, GROUP, RUN
            )
            y = silu_times(y, up.to(kind))
        tl.store(out + m * size_out + n, y, mask=n < size_out)


@triton.jit
def _row(
    x: tl.tensor,
    words: tl.tensor,
    heads: tl.tensor,
    known: tl.tensor,
    within: tl.tensor,
    size_in: tl.tensor,
    head_stride: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
) -> tl.tensor:
    """A row of x times the weight's [rows, pieces, pairs / 4, 4].

    A code of c, put under the bits of 1, is 1 + c / STEPS.
    """
    PAIRS: tl.constexpr = RUN // 2
    PIECE: tl.constexpr = 16 // BITS * RUN
    STEPS: tl.constexpr = 1 << BITS
    BASE: tl.constexpr = 1024 if tl.float16 == KIND else 128 if BITS == 4 else 0
    first = within // PAIRS * (PIECE // 2) + within % PAIRS
    y = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
    for start in tl.static_range(0, PIECE, GROUP if GROUP < PIECE else PIECE):
        acc = tl.zeros(words.shape, tl.float32)
        total = tl.zeros(within.shape, tl.float32)
        for run in tl.static_range(start // RUN, (start + (GROUP if GROUP < PIECE else PIECE)) // RUN):
            at = first + run * PAIRS
            both = tl.load(x + at, mask=at < size_in // 2, other=0)
            low, high = _half(both, KIND), _half(both >> 16, KIND)
            total += low + high
            acc += _under(words, BITS * run, BITS) * low[None, :, :, :]
            acc += _under(words, 16 + BITS * run, BITS) * high[None, :, :, :]
        head = tl.load(heads + start // GROUP * head_stride, mask=known, other=0)
        scale = (head >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
        zero = head.to(tl.int16).to(KIND, bitcast=True).to(tl.float32) - BASE
        sums, total = tl.sum(tl.sum(acc, 3), 2), tl.sum(tl.sum(total, 2), 1)
        y += (sums * STEPS - (zero + STEPS) * total[None, :]) * scale
    return tl.sum(y, 1)


@triton.jit
def _half(both: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The number in the low 16 bits."""
    return both.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _under(words: tl.tensor, AT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The code at bit `AT` under the bits of 1."""
    TOP: tl.constexpr = 23 - BITS
    moved = words << (TOP - AT) if AT <= TOP else words >> (AT - TOP)
    MASK: tl.constexpr = ((1 << BITS) - 1) << TOP
    if _INTERPRETED:
        return ((moved & MASK) | 0x3F800000).to(tl.float32, bitcast=True)
    else:  # in one instruction
        ASM: tl.constexpr = "lop3.b32 $0, $1, 0x00780000, 0x3f800000, 0xea;"
        WIDE: tl.constexpr = "lop3.b32 $0, $1, 0x007f8000, 0x3f800000, 0xea;"
        return tl.inline_asm_elementwise(
            ASM if BITS == 4 else WIDE, "=r,r", [moved], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _unpack(
    out: tl.tensor,
    weight: tl.tensor,
    heads: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    head_stride: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Grid (size_out / ROWS, pieces): [size_out, size_in], as numbers."""
    PIECE: tl.constexpr = 16 // BITS * RUN
    BASE: tl.constexpr = 1024 if out.dtype.element_ty == tl.float16 else 128 if BITS == 4 else 0
    kind: tl.constexpr = out.dtype.element_ty
    n, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, RUN)
    at, exist = tl.program_id(1) * PIECE, n < size_out
    row = n.to(tl.int64)[:, None]
    words = tl.load(
        weight + row * (tl.num_programs(1) * RUN) + tl.program_id(1) * RUN + i[None, :], mask=exist[:, None]
    )
    for run in tl.static_range(16 // BITS):
        head = tl.load(heads + (at + run * RUN) // GROUP * head_stride + n, mask=exist)[:, None]
        scale = (head >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        zero = head.to(tl.int16).to(kind, bitcast=True).to(tl.float32) - BASE
        code = ((words.to(tl.int32) >> BITS * run) & ((1 << BITS) - 1)).to(tl.float32)
        k = at + run * RUN + i
        inside = exist[:, None] & (k < size_in)[None, :]
        tl.store(out + row * size_in + k[None, :], ((code - zero) * scale).to(kind), mask=inside)


def linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [M, K]."""
    plan = _plan(x, weight, 1)
    return F.linear(x, unpack(weight, x.dtype), bias) if plan is None else multiply(x, weight, bias, plan)


def gated(x: Tensor, weight: GroupedWeight) -> Tensor:
    """silu(x G^T) * (x U^T) for W = G over U."""
    plan = _plan(x, weight, 2)
    if plan is None:
        return gated_of(linear(x, weight), "silu")
    return multiply(x, weight, None, plan, gated=True)


def multiply(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, plan: Rows | Tiles, *, gated: bool = False
) -> Tensor:
    codes, heads, bits, group, run, size_in = weight
    num, size_out = len(x), len(codes) // (1 + gated)
    out = torch.empty(num, size_out, dtype=x.dtype, device=x.device)
    ahead, biased = overlap(num, min(size_in, size_out)), bias is not None
    grid = triton.cdiv(size_out, plan.rows)
    if isinstance(plan, Rows):
        pieces = triton.next_power_of_2(triton.cdiv(size_in, weight.piece))
        launch(_rows, grid)(
            out, x.view(torch.int32), codes.view(torch.int32), heads, bias if biased else out, size_in,
            size_out, x.stride(0) // 2, heads.stride(0), NUM=num, GATED=gated, BIASED=biased, BITS=bits,
            GROUP=group, ROWS=plan.rows, RUN=run, PIECES=pieces, OVERLAP=ahead, launch_pdl=ahead,
            num_warps=plan.warps,
        )  # fmt: skip
        return out
    parts = out
    if plan.splits > 1:
        parts = torch.empty(plan.splits * num * size_out, dtype=torch.float32, device=x.device)
    length = min(plan.length, run)
    launch(_tiles, triton.cdiv(num, plan.num) * grid, plan.splits)(
        out, tiled(x, plan.num, length), tiled(codes, plan.rows, length), heads, bias if biased else out,
        parts, arrivals_of(x.device), num, size_in, size_out, heads.stride(0), GATED=gated, BIASED=biased,
        BITS=bits, GROUP=group, NUM=plan.num, ROWS=plan.rows, RUN=run, LENGTH=length, SPLITS=plan.splits,
        OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


def unpack(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """[size_out, size_in]"""
    codes, heads, bits, group, run, size_in = weight
    out = torch.empty(len(codes), size_in, dtype=dtype, device=codes.device)
    launch(_unpack, triton.cdiv(len(codes), 64), codes.shape[1] // run)(
        out, codes, heads, size_in, len(codes), heads.stride(0), BITS=bits, GROUP=group, ROWS=64, RUN=run,
    )  # fmt: skip
    return out


def _plan(x: Tensor, weight: GroupedWeight, parts: int) -> Rows | Tiles | None:
    """None: unpacked, by the library."""
    num, even = len(x), x.stride(0) % 2 == 0 and x.stride(1) == 1 and x.data_ptr() % 4 == 0
    plan = choose(num, len(weight.codes), weight.size_in, parts) if 0 < num <= MOST_TILED else None
    if isinstance(plan, Rows):
        return plan if even and weight.size_in % 2 == 0 else None
    return plan if plan is not None and aligned(x) and has_room() else None


class _Shapes(NamedTuple):
    """Tiles for so many rows of x: of a product, whose splits are the most that there may be; of gate and up;
    and how many programs there should be at most."""

    one: Tiles
    gated: Tiles | None
    programs: int


_SHAPES = {
    16: _Shapes(Tiles(16, 64, 64, 8, 2, 3), Tiles(16, 64, 64, 1, 2, 5), 800),
    32: _Shapes(Tiles(32, 64, 64, 8, 2, 3), Tiles(32, 32, 64, 1, 2, 3), 512),
    64: _Shapes(Tiles(64, 64, 64, 4, 2, 3), Tiles(64, 64, 32, 1, 2, 4), 256),
    128: _Shapes(Tiles(64, 64, 32, 4, 4, 2), Tiles(128, 128, 32, 1, 8, 4), 512),
    MOST_TILED: _Shapes(Tiles(128, 64, 32, 2, 4, 3), None, 400),
}
"""By the most rows of x."""
_WIDE = Tiles(256, 128, 32, 1, 8, 3)
"""Where many rows meet many outputs."""


@functools.cache
def choose(num: int, size_out: int, size_in: int, parts: int) -> Rows | Tiles | None:
    """How to multiply `num` rows with a weight of this shape; `parts` is 2 for gate and up; None: not so.

    As measured on an H200 in graphs of products with different weights.
    """
    length = triton.next_power_of_2(size_in)
    if num == 1 and parts == 1 and length <= 4096 and size_out * size_in <= 2**24:
        return Rows(16, 4)
    one, gated, programs = next(shapes for most, shapes in _SHAPES.items() if num <= most)
    if parts == 2:
        return gated
    tiles = triton.cdiv(num, one.num) * triton.cdiv(size_out, one.rows)
    if num > 128 and tiles > programs:
        return _WIDE
    splits = 1
    while splits < one.splits and 2 * splits * tiles <= programs and 1024 * splits <= size_in:
        splits *= 2
    return one._replace(splits=splits)
