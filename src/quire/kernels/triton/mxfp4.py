"""MoE layers in MXFP4 on a GPU, with weights dequantized in registers.

The reference is `mix` of `kernels/reference/moe.py`. A byte of the weights has elements i and 16 + i of its
block of 32. The bits of an element, moved to the exponent and mantissa of a float32, give its value divided
by 2^126. The result is multiplied by 2^63 twice, because 2^126 times the scale exceeds float32.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import batch_invariant
from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.moe import MoERowsPlan, MoETile, MoETilesPlan, Plan
from quire.kernels.triton.moe_align import Sorted, most_tiles, sorted_mix, tile_at
from quire.kernels.triton.tile_dots import empty, times, upright

_HALF_WAY = tl.constexpr(2.0**63)
_BLOCKS = tl.constexpr(32)
"""Blocks of a row per step of the row kernels."""


class Mxfp4Weights(NamedTuple):
    """Weights of all experts of a layer. The first half of the rows of `gate_up` is the gate projection."""

    gate_up: Tensor
    """[experts, 2 * intermediate, hidden / 32, 16]"""
    gate_up_scales: Tensor
    """[experts, 2 * intermediate, hidden / 32]"""
    down: Tensor
    down_scales: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@triton.jit
def _decode(codes: tl.tensor) -> Any:
    """Return the low and the high value of each byte of codes, in float32 and divided by 2^126."""
    wide = codes.to(tl.int32)
    low = ((wide & 7) << 22) | ((wide & 8) << 28)
    high = ((wide & 0x70) << 18) | ((wide & 0x80) << 24)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _power(scales: tl.tensor) -> tl.tensor:
    """Return 2^63 times the scales, which are stored as exponents; callers multiply by another 2^63."""
    return ((tl.minimum(scales.to(tl.int32), 191) + 63) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _row_sums(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, rows: tl.tensor, live: tl.tensor, blocks: tl.tensor
) -> tl.tensor:
    """Return the products [rows] of x with weight rows of `blocks` blocks. A thread has whole blocks."""
    acc = tl.zeros([rows.shape[0], _BLOCKS], tl.float32)
    block, byte = tl.arange(0, _BLOCKS), tl.arange(0, 16)
    for at in range(0, blocks, _BLOCKS):
        exists = block < blocks - at
        valid, place = live[:, None] & exists[None, :], rows[:, None] * blocks + (at + block)[None, :]
        packed = codes + place[:, :, None] * 16 + byte[None, None, :]
        low, high = _decode(tl.load(packed, mask=valid[:, :, None], other=0, eviction_policy="evict_first"))
        k = (at + block)[:, None] * 32 + byte[None, :]
        left = tl.load(x + k, mask=exists[:, None], other=0.0).to(tl.float32) * _HALF_WAY
        right = tl.load(x + k + 16, mask=exists[:, None], other=0.0).to(tl.float32) * _HALF_WAY
        scale = _power(tl.load(scales + place, mask=valid, other=0))
        acc += tl.sum(low * left[None] + high * right[None], 2) * scale
    return tl.sum(acc, 1)


@triton.jit
def _up_rows(
    out: tl.tensor, x: tl.tensor, codes: tl.tensor, scales: tl.tensor, bias: tl.tensor, ids: tl.tensor,
    blocks: tl.tensor, size_out: tl.tensor, x_stride: tl.tensor,
    TOP: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS elements of act(gate) * up for a (token, expert) pair. Grid: (pairs * size_out /
    ROWS,)."""
    stripes = tl.cdiv(size_out, ROWS)
    pair, n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS + tl.arange(0, ROWS)
    follow(OVERLAP)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    row = expert * 2 * size_out + n
    x += pair // TOP * x_stride
    gate = _row_sums(x, codes, scales, row, n < size_out, blocks)
    up = _row_sums(x, codes, scales, row + size_out, n < size_out, blocks)
    if bias is not None:
        gate += tl.load(bias + row, mask=n < size_out).to(tl.float32)
        up += tl.load(bias + row + size_out, mask=n < size_out).to(tl.float32)
    kind = out.dtype.element_ty
    y = gate_times(gate.to(kind), up.to(kind), ACTIVATION)
    tl.store(out + pair * size_out + n, y, mask=n < size_out)


@triton.jit
def _down_rows(
    out: tl.tensor, x: tl.tensor, codes: tl.tensor, scales: tl.tensor, bias: tl.tensor, ids: tl.tensor,
    weights: tl.tensor, blocks: tl.tensor, size_out: tl.tensor,
    TOP: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS outputs of down for one token, weighted and summed over its experts in order. Grid:
    (tokens * size_out / ROWS,)."""
    stripes = tl.cdiv(size_out, ROWS)
    token, n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS + tl.arange(0, ROWS)
    follow(OVERLAP)
    y = tl.zeros([ROWS], tl.float32)
    for rank in range(TOP):
        pair = token * TOP + rank
        expert = tl.load(ids + pair).to(tl.int64)
        if expert >= 0:
            row = expert * size_out + n
            term = _row_sums(x + pair.to(tl.int64) * blocks * 32, codes, scales, row, n < size_out, blocks)
            if bias is not None:
                term += tl.load(bias + row, mask=n < size_out, other=0.0).to(tl.float32)
            y += term * tl.load(weights + pair)
    place = out + token.to(tl.int64) * size_out + n
    tl.store(place, y.to(out.dtype.element_ty), mask=n < size_out)


@triton.jit
def _dequantize(
    codes: tl.tensor, scales: tl.tensor, row: tl.tensor, live: tl.tensor, at: tl.tensor, blocks: tl.tensor,
    COUNT: tl.constexpr, KIND: tl.constexpr,
) -> Any:  # fmt: skip
    """Dequantize `COUNT` blocks of some rows, from block `at` on, to the dtype `KIND`. Return their first and
    second halves, each [rows, 16 * COUNT]. The values are divided by 2^63, so that exponents stay in range,
    and the caller multiplies its sums; float16 does not have the range for that."""
    block, byte = at + tl.arange(0, COUNT), tl.arange(0, 16)
    valid, place = live[:, None] & (block < blocks)[None, :], row[:, None] * blocks + block[None, :]
    packed = codes + place[:, :, None] * 16 + byte[None, None, :]
    low, high = _decode(tl.load(packed, mask=valid[:, :, None], other=0))
    scale = _power(tl.load(scales + place, mask=valid, other=0))[:, :, None]
    if tl.float16 == KIND:
        low, high = low * _HALF_WAY, high * _HALF_WAY
    shape: tl.constexpr = [row.shape[0], 16 * COUNT]
    return tl.reshape((low * scale).to(KIND), shape), tl.reshape((high * scale).to(KIND), shape)


@triton.jit
def _tiles(
    out: tl.tensor, x: tl.tensor, codes: tl.tensor, scales: tl.tensor, bias: tl.tensor, order: tl.tensor,
    work: tl.tensor, blocks: tl.tensor, size_out: tl.tensor, x_stride: tl.tensor,
    TOP: tl.constexpr, ACTIVATION: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of sorted (token, expert) pairs with dequantized weights; the arguments are like those
    of `tiles` of moe_tiles.py. Grid: (most tiles * size_out / ROWS,)."""
    KIND: tl.constexpr = x.dtype.element_ty
    COUNT: tl.constexpr = LENGTH // 32
    stripes = tl.cdiv(size_out, ROWS)
    tile, n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS + tl.arange(0, ROWS)
    follow(OVERLAP)
    if tile >= tl.load(work):
        return
    expert, _, end, pair, m = tile_at(order, work, tile, NUM)
    expert = expert.to(tl.int64)
    x_row, row = m.to(tl.int64), expert * size_out + n
    if ACTIVATION != "":
        x_row, row = pair // TOP, expert * 2 * size_out + n
    acc, up = empty(NUM, ROWS), empty(NUM, ROWS)
    half = tl.arange(0, LENGTH // 2)
    k = half // 16 * 32 + half % 16
    for at in range(0, blocks, COUNT):
        valid = (m < end)[:, None] & (k < (blocks - at) * 32)[None, :]
        a = x + x_row[:, None] * x_stride + (at * 32 + k)[None, :]
        left, right = tl.load(a, mask=valid, other=0.0), tl.load(a + 16, mask=valid, other=0.0)
        low, high = _dequantize(codes, scales, row, n < size_out, at, blocks, COUNT, KIND)
        acc = times(right, high, times(left, low, acc))
        if ACTIVATION != "":
            low, high = _dequantize(codes, scales, row + size_out, n < size_out, at, blocks, COUNT, KIND)
            up = times(right, high, times(left, low, up))
    kind = out.dtype.element_ty
    y = _finish(acc, bias, row, n < size_out, NUM, KIND).to(kind)
    if ACTIVATION != "":
        y = gate_times(y, _finish(up, bias, row + size_out, n < size_out, NUM, KIND).to(kind), ACTIVATION)
        pair = m.to(tl.int64)
    inside = (m < end)[:, None] & (n < size_out)[None, :]
    tl.store(out + pair[:, None] * size_out + n[None, :], y, mask=inside)


@triton.jit
def _finish(
    acc: tl.tensor, bias: tl.tensor, row: tl.tensor, live: tl.tensor, NUM: tl.constexpr, KIND: tl.constexpr
) -> tl.tensor:
    acc = upright(acc, NUM)
    if tl.float16 != KIND:
        acc *= _HALF_WAY
    if bias is not None:
        acc += tl.load(bias + row, mask=live, other=0.0).to(tl.float32)[None, :]
    return acc


def mix(x: Tensor, ids: Tensor, weights: Tensor, experts: Mxfp4Weights, activation: str) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs, [T, hidden] for x [T, hidden]; the
    reference is `mix` of kernels/reference/moe.py."""
    if not len(x):
        return torch.empty_like(x)
    is_fixed = batch_invariant.is_on()
    plan = plan_of(ids.numel(), len(experts.down), x.dtype, fixed=is_fixed)
    return mixed(x, ids, weights, experts, activation, plan)


def mixed(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Mxfp4Weights, activation: str, plan: Plan
) -> Tensor:
    """Compute `mix` with the kernels of `plan`: weight rows in registers for few tokens, or tiles of sorted
    (token, expert) pairs."""
    (num, hidden), top, inner = x.shape, ids.shape[1], 32 * experts.down.shape[2]
    up, down = experts[:2], experts[2:4]
    if isinstance(plan, MoERowsPlan):
        ahead = overlap(1)
        activated = torch.empty(num * top, inner, dtype=x.dtype, device=x.device)
        out = torch.empty_like(x)
        launch(_up_rows, num * top * triton.cdiv(inner, plan.up))(
            activated, x, *up, experts.gate_up_bias, ids, hidden // 32, inner, x.stride(0), TOP=top,
            ACTIVATION=activation, ROWS=plan.up, OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.up_warps,
        )  # fmt: skip
        launch(_down_rows, num * triton.cdiv(hidden, plan.down))(
            out, activated, *down, experts.down_bias, ids, weights, inner // 32, hidden, TOP=top,
            ROWS=plan.down, OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.down_warps,
        )  # fmt: skip
        return out
    by_plan = functools.partial(_multiply, plan=plan, top=top)
    first = functools.partial(by_plan, weight=up, bias=experts.gate_up_bias, activation=activation)
    last = functools.partial(by_plan, weight=down, bias=experts.down_bias, activation="")
    sizes = len(experts.down), inner
    return sorted_mix(x, ids, weights, first, last, sizes=sizes, height=plan.num)


def _multiply(
    out: Tensor,
    x: Tensor,
    pairs: Sorted,
    *,
    weight: tuple[Tensor, Tensor],
    bias: Tensor | None,
    plan: MoETilesPlan,
    top: int,
    activation: str,
    ahead: bool,
) -> None:
    """Write a row of `out` for each sorted (token, expert) pair: with an activation, act(gate) * up from the
    tokens x; without one, the down projection of rows x of sorted pairs."""
    codes, scales = weight
    (num, size_out), tile = out.shape, plan.up if activation else plan.down
    launch(_tiles, most_tiles(num, len(codes), plan.num) * triton.cdiv(size_out, tile.rows))(
        out, x, codes, scales, bias, *pairs, codes.shape[2], size_out, x.stride(0), TOP=top,
        ACTIVATION=activation, NUM=plan.num, ROWS=tile.rows, LENGTH=tile.length, OVERLAP=ahead,
        launch_pdl=ahead, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


_TILES = {
    16: (MoETile(64, 64, 4, 4), MoETile(64, 64, 4, 4)),
    32: (MoETile(64, 128, 4, 3), MoETile(64, 128, 4, 3)),
    64: (MoETile(64, 128, 4, 3), MoETile(128, 128, 4, 3)),
    128: (MoETile(64, 64, 8, 3), MoETile(128, 64, 8, 3)),
}
"""Tiles of gate and up, and of down, by the number of pairs per tile."""


@functools.cache
def plan_of(num_pairs: int, num_experts: int, dtype: torch.dtype, *, fixed: bool = False) -> Plan:
    """Return the plan for `num_pairs` (token, expert) pairs (H200, benchmarks/kernel_mxfp4.py). Unless x is
    float32, a `fixed` plan does not depend on `num_pairs`."""
    if fixed and dtype != torch.float32:
        return MoETilesPlan(64, *_TILES[64])
    if not fixed and num_pairs <= num_experts // 2:
        return MoERowsPlan(4, 4, 2, 2)
    if dtype == torch.float32:
        return MoETilesPlan(16, MoETile(32, 64, 4, 2), MoETile(32, 64, 4, 2))
    mean = num_pairs / num_experts
    height = 16 if mean <= 12 else 32 if mean <= 64 else 64 if mean <= 128 else 128
    return MoETilesPlan(height, *_TILES[height])
