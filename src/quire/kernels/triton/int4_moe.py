"""MoE layers with grouped 4-bit or 8-bit weights, which are dequantized in registers; see `moe.py`."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels import batch_invariant
from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.int4 import float_bits
from quire.kernels.triton.launch import follow, launch
from quire.kernels.triton.matmul import tiled
from quire.kernels.triton.moe_align import Sorted, most_tiles, sorted_mix, tile_at

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Int4ExpertWeights(NamedTuple):
    """Weights [size_out, size_in] of one or more experts in the layout of the kernels.

    The inputs of a row are divided into runs of `run` inputs; `16 / bits` consecutive runs are a piece. The
    i-th int16 of a piece contains the i-th code of each of its runs, the first run in the lowest bits.
    """

    codes: Tensor
    """[experts * size_out, padded size_in * bits / 16] int16"""
    heads: Tensor
    """[experts, groups, size_out] int32: the scale in the upper 16 bits and the zero plus `offset` in the
    lower 16, both in the dtype of x."""
    bits: int
    group: int
    run: int
    size_in: int


def offset(bits: int, dtype: torch.dtype) -> int:
    """Return the offset that a code of `bits` bits has while its bits are in the mantissa of a float of
    `dtype`."""
    return 1024 if dtype == torch.float16 else 128 if bits == 4 else 0


def run_of(size_in: int, group: int, bits: int) -> int:
    """Return the number of inputs of a run: the longest that divides a group and the inputs, or 16."""
    fitting = [run for run in (64, 32, 16) if group % run == 0 and size_in % (16 // bits * run) == 0]
    return fitting[0] if fitting else 16


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, *, bits: int, dtype: torch.dtype) -> Int4ExpertWeights:
    """Pack a weight with codes [size_out, size_in] uint8, and scales and zeros [size_out, groups]."""
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
    high = float_bits(scales, dtype) << 16
    heads = (high | float_bits(zeros + offset(bits, dtype), dtype)).t()
    heads = F.pad(heads, (0, 0, 0, triton.cdiv(padded, group) - len(heads))).contiguous()
    return Int4ExpertWeights(packed, heads, bits, group, run, size_in)


def stack(weights: Sequence[Int4ExpertWeights]) -> Int4ExpertWeights:
    """Stack the weights of experts: codes [experts * size_out, ...], heads [experts, ...]."""
    codes, heads = torch.cat([w.codes for w in weights]), torch.stack([w.heads for w in weights])
    return weights[0]._replace(codes=codes, heads=heads)


@triton.constexpr_function
def _dequantize_asm(bits: int, run: int, is_half: bool) -> str:
    """Return PTX that dequantizes the codes of run number `run` in two int16: (code - zero) * scale."""
    kind, under = ("f16x2", "0x64006400") if is_half else ("bf16x2", "0x43004300")
    mask = "0x00ff00ff" if bits == 8 and is_half else "0x000f000f"
    low = f"lop3.b32 t, t, {mask}, {under}, 0xea;"
    if bits == 8 and not is_half:  # 8 bits do not fit the mantissa: 16 * high + low
        low = (
            f"mov.b32 v, {under}; mov.b32 w, 0x41804180; shr.b32 u, t, 4;"
            f"lop3.b32 u, u, {mask}, {under}, 0xea; sub.{kind} u, u, v; {low} sub.{kind} t, t, v;"
            f"fma.rn.{kind} t, u, w, t;"
        )
    shift, scaled = f"shr.b32 t, $1, {bits * run};", f"sub.{kind} t, t, $2; mul.{kind} $0, t, $4;"
    return f"{{ .reg .b32 t, u, v, w; {shift} {low} {scaled} }}"


@triton.jit
def _duplicate(low: tl.tensor) -> tl.tensor:
    """Copy the lower 16 bits to the upper 16."""
    return (low & 0xFFFF) | (low << 16)


@triton.jit
def spread(
    words: tl.tensor, heads: tl.tensor, KIND: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr
) -> tl.tensor:
    """Dequantize run number RUN of int16 words [rows, length]; `heads` are scale and zero of each row."""
    if _INTERPRETED:
        zero = (heads & 0xFFFF).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)[:, None]
        scale = (heads >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)[:, None]
        base: tl.constexpr = 1024 if tl.float16 == KIND else 128 if BITS == 4 else 0
        code = (words.to(tl.int32) >> BITS * RUN) & ((1 << BITS) - 1)
        return ((code.to(tl.float32) - (zero - base)) * scale).to(KIND)
    else:
        zero = tl.broadcast_to(_duplicate(heads)[:, None], words.shape)
        scale = tl.broadcast_to(_duplicate(heads >> 16)[:, None], words.shape)
        ASM: tl.constexpr = _dequantize_asm(BITS, RUN, tl.float16 == KIND)
        pairs = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r,r,r", [words, zero, scale], dtype=tl.int16, is_pure=True, pack=2
        )
        return pairs.to(KIND, bitcast=True)


class Int4MoETile(NamedTuple):
    """Tile: (token, expert) pairs, weight rows, and int16 words of a row at a time, with compile options."""

    num: int
    rows: int
    length: int
    warps: int
    stages: int


@triton.jit
def _accumulate(
    operands: tl.tuple, sizes: tl.tuple,
    KIND: tl.constexpr, GATED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, NUM: tl.constexpr,
    ROWS: tl.constexpr, RUN: tl.constexpr, LENGTH: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return the products [ROWS, NUM] of a weight tile with x, and if GATED those of the up projection."""
    RUNS: tl.constexpr = 16 // BITS
    PARTS: tl.constexpr = RUN // LENGTH
    x, weight, heads, token = operands
    start, first_n, row, size_in, size_out, x_stride, head_stride = sizes
    n, i = first_n + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    exists = n < size_out
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for step in range(0, tl.cdiv(size_in, RUNS * RUN) * PARTS):
        words = weight.load([row, step * LENGTH])
        if GATED:
            up_words = weight.load([row + size_out, step * LENGTH])
        for run in tl.static_range(RUNS):
            at = step // PARTS * (RUNS * RUN) + step % PARTS * LENGTH + run * RUN
            head_at = heads + at // GROUP * head_stride + n
            head = tl.load(head_at, mask=exists)
            if GATED:
                k = at + i
                a = tl.load(
                    x + (token * x_stride)[:, None] + k[None, :], mask=(k < size_in)[None, :], other=0.0
                )
                b = spread(up_words, tl.load(head_at + size_out, mask=exists), KIND, BITS, run)
                up = tl.dot(b, tl.trans(a), up, input_precision="ieee")
            else:
                a = x.load([start, at])
            b = spread(words, head, KIND, BITS, run)
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    return acc, up


@triton.jit
def _tiles(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, heads: tl.tensor, bias: tl.tensor, order: tl.tensor,
    work: tl.tensor, size_in: tl.tensor, size_out: tl.tensor, x_stride: tl.tensor, head_stride: tl.tensor,
    groups: tl.tensor,
    TOP: tl.constexpr, ACTIVATION: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, NUM: tl.constexpr,
    ROWS: tl.constexpr, RUN: tl.constexpr, LENGTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of sorted (token, expert) pairs (`moe_align.sort`). `weight` is a descriptor of tiles.
    Grid: (most tiles * size_out / ROWS,).

    With an activation, compute gate and up of sorted pairs from tokens `x`. Without one, compute down from a
    descriptor `x` of tiles of sorted pairs, and store rows in their order before the sort.
    """
    kind: tl.constexpr = out.dtype.element_ty
    stripes = tl.cdiv(size_out, ROWS)
    tile, first_n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS
    follow(OVERLAP)
    if tile >= tl.load(work):
        return
    expert, start, end, pair, m = tile_at(order, work, tile, NUM)
    n = first_n + tl.arange(0, ROWS)
    exists = n < size_out
    row = expert * (2 * size_out if ACTIVATION != "" else size_out) + first_n
    heads += (expert * groups).to(tl.int64) * head_stride
    sizes = (start, first_n, row, size_in, size_out, x_stride, head_stride)
    operands = x, weight, heads, pair // TOP
    acc, up = _accumulate(operands, sizes, kind, ACTIVATION != "", BITS, GROUP, NUM, ROWS, RUN, LENGTH)
    if bias is not None:
        acc += tl.load(bias + row + n - first_n, mask=exists, other=0.0).to(tl.float32)[:, None]
    y = acc.to(kind)
    if ACTIVATION != "":
        if bias is not None:
            up += tl.load(bias + row + size_out + n - first_n, mask=exists, other=0.0).to(tl.float32)[:, None]
        y = gate_times(y, up.to(kind), ACTIVATION)
        pair = m.to(tl.int64)
    tl.store(out + pair[None, :] * size_out + n[:, None], y, mask=(m < end)[None, :] & exists[:, None])


def mix(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Int4ExpertWeights,
    down: Int4ExpertWeights,
    biases: tuple[Tensor | None, Tensor | None],
    activation: str,
) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs, [T, hidden] for x [T, hidden]; the
    reference is `mix` of kernels/reference/moe.py."""
    if not len(x):
        return torch.empty_like(x)
    sizes, top = (len(down.heads), down.size_in), ids.shape[1]
    tile = plan_of(ids.numel() / len(down.heads))
    by_tile = functools.partial(multiply, tile=tile, top=top)
    first = functools.partial(by_tile, weight=gate_up, bias=biases[0], activation=activation)
    last = functools.partial(by_tile, weight=down, bias=biases[1])
    return sorted_mix(x, ids, weights, first, last, sizes=sizes, height=tile.num)


def multiply(
    out: Tensor,
    x: Tensor,
    pairs: Sorted,
    *,
    weight: Int4ExpertWeights,
    bias: Tensor | None,
    tile: Int4MoETile,
    top: int,
    activation: str = "",
    ahead: bool,
) -> None:
    """Write a row of `out` for each sorted (token, expert) pair: with an activation, act(gate) * up from the
    tokens x; without one, the down projection of rows x of sorted pairs."""
    codes, heads, bits, group, run, size_in = weight
    (num, size_out), length = out.shape, min(tile.length, run)
    rows: Tensor | TensorDescriptor = x if activation else tiled(x, tile.num, length)
    launch(_tiles, most_tiles(num, len(heads), tile.num) * triton.cdiv(size_out, tile.rows))(
        out, rows, tiled(codes, tile.rows, length), heads, bias, *pairs, size_in, size_out, x.stride(0),
        heads.stride(1), heads.shape[1], TOP=top, ACTIVATION=activation, BITS=bits, GROUP=group, NUM=tile.num,
        ROWS=tile.rows, RUN=run, LENGTH=length, OVERLAP=ahead, launch_pdl=ahead, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def plan_of(mean: float) -> Int4MoETile:
    """Return the tile for an average of `mean` (token, expert) pairs per expert."""
    height = 64 if batch_invariant.is_on() else 16 if mean <= 10 else 32 if mean <= 24 else 64
    return Int4MoETile(height, 64, 64 if height < 64 else 32, 2 if height < 64 else 4, 3)
