"""MoE layers with int8 weights and one scale per output channel.

The reference is `mix` of `kernels/reference/moe.py`. As in `moe.py`, (token, expert) pairs are sorted and
multiplied in tiles; the weight is dequantized in registers.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.int8 import Int8Codes
from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.int8 import Int8TilesPlan
from quire.kernels.triton.launch import follow, launch
from quire.kernels.triton.matmul import has_room, tiled
from quire.kernels.triton.moe_align import Sorted, most_tiles, sorted_mix, tile_at


class ExpertCodes(NamedTuple):
    """`ExpertWeights` in int8 with one scale per output."""

    gate_up: Int8Codes
    down: Int8Codes
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@triton.jit
def _tiles(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor, order: tl.tensor,
    work: tl.tensor, size_in: tl.tensor, size_out: tl.tensor, x_stride: tl.tensor,
    TOP: tl.constexpr, ACTIVATION: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of sorted (token, expert) pairs (`moe_align.sort`). `weight` is a descriptor of tiles.
    Grid: (most tiles * size_out / ROWS,).

    With an activation, compute gate and up of sorted pairs from tokens `x`. Without one, compute down of
    sorted pairs `x`, and store rows in their order before the sort. Sums are transposed.
    """
    stripes = tl.cdiv(size_out, ROWS)
    tile, first_n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS
    follow(OVERLAP)
    if tile >= tl.load(work):
        return
    expert, start, end, pair, m = tile_at(order, work, tile, NUM)
    n = first_n + tl.arange(0, ROWS)
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    if ACTIVATION != "":
        row, source = expert * 2 * size_out + first_n, pair // TOP
    else:
        row, source = expert * size_out + first_n, tl.minimum(m, end - 1).to(tl.int64)
    k = tl.arange(0, LENGTH)
    at_x = x + (source * x_stride)[None, :] + k[:, None]
    for at in range(0, size_in, LENGTH):
        a = tl.load(at_x + at, mask=(k < size_in - at)[:, None], other=0.0)
        acc = _accumulate(weight.load([row, at]), a, acc)
        if ACTIVATION != "":
            up = _accumulate(weight.load([row + size_out, at]), a, up)
    kind = out.dtype.element_ty
    exists = n < size_out
    y = _rescale(acc, scales, bias, row, n - first_n, exists).to(kind)
    if ACTIVATION != "":
        other = _rescale(up, scales, bias, row + size_out, n - first_n, exists)
        y = gate_times(y, other.to(kind), ACTIVATION)
        pair = m.to(tl.int64)
    inside = (m < end)[:, None] & exists[None, :]
    tl.store(out + pair[:, None] * size_out + n[None, :], tl.trans(y), mask=inside)


@triton.jit
def _accumulate(w: tl.tensor, a: tl.tensor, acc: tl.tensor) -> tl.tensor:
    return tl.dot(w.to(a.dtype), a, acc, input_precision="ieee")


@triton.jit
def _rescale(
    acc: tl.tensor, scales: tl.tensor, bias: tl.tensor, row: tl.tensor, n: tl.tensor, exists: tl.tensor
) -> tl.tensor:
    acc *= tl.load(scales + row + n, mask=exists, other=0.0)[:, None]
    if bias is not None:
        acc += tl.load(bias + row + n, mask=exists, other=0.0).to(tl.float32)[:, None]
    return acc


def mix(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertCodes, activation: str) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs, [T, hidden] for x [T, hidden]; the
    reference is `mix` of kernels/reference/moe.py."""
    if not len(x):
        return torch.empty_like(x)
    num_experts, _, inner = experts.down.codes.shape
    plan = plan_of(ids.numel(), num_experts)
    by_plan = functools.partial(multiply, plan=plan, top=ids.shape[1])
    up = functools.partial(by_plan, weight=experts.gate_up, bias=experts.gate_up_bias, activation=activation)
    down = functools.partial(by_plan, weight=experts.down, bias=experts.down_bias)
    return sorted_mix(x, ids, weights, up, down, sizes=(num_experts, inner), height=plan.num)


def multiply(
    out: Tensor,
    x: Tensor,
    pairs: Sorted,
    *,
    weight: Int8Codes,
    bias: Tensor | None,
    plan: Int8TilesPlan,
    top: int,
    activation: str = "",
    ahead: bool,
) -> None:
    """Write a row of `out` for each sorted (token, expert) pair: with an activation, act(gate) * up from the
    tokens x; without one, the down projection of rows x of sorted pairs."""
    (num, size_out), size_in = out.shape, x.shape[1]
    launch(_tiles, most_tiles(num, len(weight.codes), plan.num) * triton.cdiv(size_out, plan.rows))(
        out, x, tiled(weight.codes.flatten(0, 1), plan.rows, plan.length), weight.scales, bias,
        *pairs, size_in, size_out, x.stride(0), TOP=top, ACTIVATION=activation, NUM=plan.num, ROWS=plan.rows,
        LENGTH=plan.length, OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


@functools.cache
def plan_of(num_pairs: int, num_experts: int) -> Int8TilesPlan:
    mean = num_pairs / num_experts
    height = 16 if mean <= 10 else 32 if mean <= 24 else 64
    if not has_room():
        return Int8TilesPlan(height, 64, 64, 4, 2)
    return Int8TilesPlan(height, 64 if height < 64 else 128, 128, 4 if height < 64 else 8, 3)
