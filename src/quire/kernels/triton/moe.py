"""MoE layers on a GPU; the reference is `mix` of `kernels/reference/moe.py`.

A pair is a token and one of its experts. For few tokens, programs load whole weight rows of each pair's
expert into registers. For more tokens, pairs are sorted by expert. Tiles of pairs with the same expert are
multiplied with its weights on the tensor cores, so that each chosen expert is read once. Nothing here
synchronizes with the device, and launches depend on the number of tokens only, so that CUDA graphs can
capture them. Sums have a fixed order: results are deterministic.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels import batch_invariant
from quire.kernels.reference.fp8 import E4M3
from quire.kernels.reference.moe import ExpertAdapters, ExpertWeights
from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.fp8 import quantize
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.lora_few import NO_LORA, AddedRows, PairAdapters
from quire.kernels.triton.matmul import has_room, tiled
from quire.kernels.triton.moe_align import Sorted, most_tiles, sort, sorted_mix
from quire.kernels.triton.moe_tiles import tiles
from quire.kernels.triton.moe_topk import choose, route
from quire.kernels.triton.tile_dots import LONGEST, scales_of

__all__ = ["choose", "mix", "most_tiles", "route", "sort"]


class MoERowsPlan(NamedTuple):
    """Plan for few tokens: weight rows of gate and up per program, weight rows of down per program and
    expert, and the warps of both kernels."""

    up: int
    down: int
    up_warps: int
    down_warps: int


class MoETile(NamedTuple):
    """Weight rows and inputs per tile, with compile options."""

    rows: int
    length: int
    warps: int
    stages: int


class MoETilesPlan(NamedTuple):
    """Plan for many tokens: tiles of `num` (token, expert) pairs for gate and up, and for down."""

    num: int
    up: MoETile
    down: MoETile


Plan = MoERowsPlan | MoETilesPlan
_TILES = {
    16: (MoETile(128, 128, 4, 3), MoETile(128, 128, 4, 3)),
    32: (MoETile(128, 128, 4, 3), MoETile(64, 128, 4, 3)),
    64: (MoETile(128, 64, 4, 4), MoETile(128, 64, 4, 4)),
    128: (MoETile(128, 64, 8, 4), MoETile(128, 64, 4, 3)),
}
"""Tiles of gate and up, and of down, by the number of pairs per tile."""
_TILES_OF_E4M3 = {
    16: (MoETile(128, 256, 8, 3), MoETile(128, 128, 4, 3)),
    32: (MoETile(128, 256, 8, 3), MoETile(128, 128, 4, 3)),
    64: (MoETile(256, 128, 8, 3), MoETile(128, 128, 8, 3)),
    128: (MoETile(128, 128, 8, 4), MoETile(128, 128, 8, 3)),
}
_TILES_OF_BLOCKS = {
    16: (MoETile(64, 128, 4, 5), MoETile(128, 128, 4, 3)),
    32: (MoETile(128, 128, 4, 3), MoETile(128, 128, 4, 3)),
    64: (MoETile(128, 128, 8, 4), MoETile(128, 128, 8, 3)),
    128: (MoETile(128, 128, 8, 4), MoETile(128, 128, 8, 3)),
}


@triton.jit
def _up_rows(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor, ids: tl.tensor,
    size_in: tl.tensor, size_out: tl.tensor, x_stride: tl.tensor, added: tl.tensor, slots: tl.tensor,
    TOP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCKED: tl.constexpr, ROWS: tl.constexpr,
    LENGTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS elements of act(gate) * up for one (token, expert) pair, to `out` [pairs, size_out]. The
    next kernel may start only after `ids` are written. Grid: (pairs * size_out / ROWS,)."""
    stripes = tl.cdiv(size_out, ROWS)
    pair, n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, LENGTH)
    exists = (n < size_out)[:, None] & (k < size_in)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    at = weight + (expert * 2 * size_out + n)[:, None] * size_in + k[None, :]
    gate = tl.load(at, mask=exists, other=0.0, eviction_policy="evict_first")
    at += size_out.to(tl.int64) * size_in
    up = tl.load(at, mask=exists, other=0.0, eviction_policy="evict_first")
    row = tl.load(x + pair // TOP * x_stride + k, mask=k < size_in, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) % stripes * ROWS
    by_k, by_n = scales_of(scale, expert, first, n, k, size_in, 2 * size_out, BLOCKED)
    gate = tl.sum(gate.to(tl.float32) * (row * by_k)[None, :], 1) * by_n
    first += size_out
    by_k, by_n = scales_of(scale, expert, first, n + size_out, k, size_in, 2 * size_out, BLOCKED)
    up = tl.sum(up.to(tl.float32) * (row * by_k)[None, :], 1) * by_n
    if bias is not None:
        gate += tl.load(bias + expert * 2 * size_out + n, mask=n < size_out).to(tl.float32)
        up += tl.load(bias + (expert * 2 + 1) * size_out + n, mask=n < size_out).to(tl.float32)
    if added is not None:
        added_at, outputs = added + pair * 2 * size_out + n, tl.where(tl.load(slots + pair) >= 0, size_out, 0)
        gate += tl.load(added_at, mask=n < outputs, other=0.0).to(tl.float32)
        up += tl.load(added_at + size_out, mask=n < outputs, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    y = gate_times(gate.to(kind), up.to(kind), ACTIVATION)
    tl.store(out + pair * size_out + n, y, mask=n < size_out)


@triton.jit
def _down_rows(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor, ids: tl.tensor,
    weights: tl.tensor, size_in: tl.tensor, size_out: tl.tensor, added: tl.tensor, slots: tl.tensor,
    TOP: tl.constexpr, BLOCKED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS outputs of down for one token, weighted and summed over its TOP experts, to `out` [tokens,
    size_out]. `EXPERTS` >= TOP is a power of two. Grid: (tokens * size_out / ROWS,).

    `ids` and `weights` are read before `_up_rows` has ended, and bypass the L1 cache.
    """
    stripes = tl.cdiv(size_out, ROWS)
    token, n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS + tl.arange(0, ROWS)
    rank, k = tl.arange(0, EXPERTS), tl.arange(0, LENGTH)
    pair = token.to(tl.int64) * TOP + rank
    expert = tl.load(ids + pair, mask=rank < TOP, other=-1, cache_modifier=".cg").to(tl.int64)
    here = expert >= 0
    share = tl.load(weights + pair, mask=rank < TOP, other=0.0, cache_modifier=".cg")
    row = expert[:, None] * size_out + n[None, :]
    valid = here[:, None] & (n < size_out)[None, :]
    w_valid = valid[:, :, None] & (k < size_in)[None, None, :]
    at = weight + row[:, :, None] * size_in + k[None, None, :]
    w = tl.load(at, mask=w_valid, other=0.0, eviction_policy="evict_first")
    follow(OVERLAP)
    exists = here[:, None] & (k < size_in)[None, :]
    values = tl.load(x + pair[:, None] * size_in + k[None, :], mask=exists, other=0.0).to(tl.float32)
    values *= share[:, None]
    if scale is None:
        y = tl.sum(tl.sum(w.to(tl.float32) * values[:, None, :], 0), 1)
    elif BLOCKED:
        groups = tl.cdiv(size_in, 128)
        block = expert * tl.cdiv(size_out, 128) + tl.program_id(0) % stripes * ROWS // 128
        values *= tl.load(scale + block[:, None] * groups + k[None, :] // 128, mask=exists, other=0.0)
        y = tl.sum(tl.sum(w.to(tl.float32) * values[:, None, :], 0), 1)
    else:
        by_row = tl.load(scale + row, mask=valid, other=0.0)
        y = tl.sum(tl.sum(w.to(tl.float32) * values[:, None, :], 2) * by_row, 0)
    if bias is not None:
        y += tl.sum(tl.load(bias + row, mask=valid, other=0.0).to(tl.float32) * share[:, None], 0)
    if added is not None:
        has_adapter = valid & (tl.load(slots + pair, mask=rank < TOP, other=-1) >= 0)[:, None]
        lora = tl.load(added + pair[:, None] * size_out + n[None, :], mask=has_adapter, other=0.0)
        y += tl.sum(lora.to(tl.float32) * share[:, None], 0)
    place = out + token.to(tl.int64) * size_out + n
    tl.store(place, y.to(out.dtype.element_ty), mask=n < size_out)


def mix(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs, [T, hidden], for x [T, hidden]; `ids`
    and `weights` [T, per_token] are those of `route`."""
    if not len(x):
        return torch.empty_like(x)
    num_experts, _, intermediate = experts.down.shape
    dtype = x.dtype if experts.down_scale is None else E4M3
    sizes = ids.numel(), ids.shape[1], num_experts, x.shape[1], intermediate
    plan = plan_of(*sizes, dtype, blocked=experts.is_blocked, fixed=batch_invariant.is_on())
    return mixed(x, ids, weights, experts, activation, plan, adapters)


def mixed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str,
    plan: Plan,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Compute `mix` with the kernels of `plan`: weight rows in registers for few tokens, or tiles of sorted
    pairs."""
    num_experts, _, inner = experts.down.shape
    pairs = None if adapters is None else PairAdapters.of(adapters, ids)
    if isinstance(plan, MoERowsPlan):
        activated = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
        out = torch.empty_like(x)
        up_rows(activated, x, ids, experts, activation, plan, NO_LORA if pairs is None else pairs.up(x))
        added = NO_LORA if pairs is None else pairs.down(activated)
        down_rows(out, activated, ids, weights, experts, plan, added)
        return out
    by_plan = functools.partial(multiply, experts=experts, plan=plan, top=ids.shape[1], adapters=pairs)
    up = functools.partial(by_plan, activation=activation)
    return sorted_mix(x, ids, weights, up, by_plan, sizes=(num_experts, inner), height=plan.num)


def up_rows(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    experts: ExpertWeights,
    activation: str,
    plan: MoERowsPlan,
    added: AddedRows = NO_LORA,
) -> None:
    num, hidden = x.shape
    inner, ahead = out.shape[1], overlap(num, hidden)
    launch(_up_rows, ids.numel() * triton.cdiv(inner, plan.up))(
        out, x, experts.gate_up, experts.gate_up_scale, experts.gate_up_bias, ids, hidden, inner,
        x.stride(0), *added, TOP=ids.shape[1], ACTIVATION=activation, BLOCKED=experts.is_blocked,
        ROWS=plan.up, LENGTH=triton.next_power_of_2(hidden), OVERLAP=ahead, launch_pdl=ahead,
        num_warps=plan.up_warps,
    )  # fmt: skip


def down_rows(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    plan: MoERowsPlan,
    added: AddedRows = NO_LORA,
) -> None:
    num, hidden = out.shape
    inner, top, ahead = x.shape[1], ids.shape[1], overlap(num, hidden)
    launch(_down_rows, num * triton.cdiv(hidden, plan.down))(
        out, x, experts.down, experts.down_scale, experts.down_bias, ids, weights, inner, hidden, *added,
        TOP=top, BLOCKED=experts.is_blocked, EXPERTS=triton.next_power_of_2(top), ROWS=plan.down,
        LENGTH=triton.next_power_of_2(inner), OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.down_warps,
    )  # fmt: skip


def multiply(
    out: Tensor,
    x: Tensor,
    pairs: Sorted,
    *,
    experts: ExpertWeights,
    plan: MoETilesPlan,
    top: int,
    activation: str = "",
    adapters: PairAdapters | None = None,
    ahead: bool,
) -> None:
    """Write a row of `out` for each sorted (token, expert) pair: with an activation, act(gate) * up from the
    tokens x; without one, the down projection of rows x of sorted pairs."""
    weight, bias, scale = experts.gate_up, experts.gate_up_bias, experts.gate_up_scale
    if not activation:
        weight, bias, scale = experts.down, experts.down_bias, experts.down_scale
    (num, size_out), size_in = out.shape, x.shape[1]
    added, x_scale = NO_LORA, None
    if adapters is not None:
        added = adapters.up(x) if activation else adapters.down(x, pairs[0])
    if scale is not None:
        x, x_scale = quantize(x, grouped=experts.is_blocked)
    tile = plan.up if activation else plan.down
    rows: Tensor | TensorDescriptor = x if activation else tiled(x, plan.num, tile.length)
    launch(tiles, most_tiles(num, len(weight), plan.num) * triton.cdiv(size_out, tile.rows))(
        out, rows, x_scale, tiled(weight.flatten(0, 1), tile.rows, tile.length), scale, bias, *pairs,
        len(x), size_in, size_out, x.stride(0), *added, TOP=top, ACTIVATION=activation,
        BLOCKED=experts.is_blocked, EVEN=size_in % tile.length == 0, NUM=plan.num, ROWS=tile.rows,
        LENGTH=tile.length, OVERLAP=ahead, launch_pdl=ahead, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@functools.cache
def plan_of(
    num_pairs: int,
    top: int,
    num_experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    *,
    blocked: bool = False,
    fixed: bool = False,
) -> Plan:
    """Return the plan for `num_pairs` (token, expert) pairs, `top` per token; `dtype` is that of the weights,
    and `blocked` says whether their scales are per block. The tiles of a `fixed` plan add in one order,
    whatever their height.

    The plans were measured on an H200 in CUDA graphs of layers with different weights; see
    docs/evidence/kernels.md.
    """
    length = triton.next_power_of_2(hidden)
    held = triton.next_power_of_2(top) * triton.next_power_of_2(inner)
    narrow = dtype == E4M3
    unit = 16 if narrow else 8
    few = num_pairs <= 3 * top and not fixed
    if few and length <= LONGEST and held <= 2**15 or hidden % unit or inner % unit:
        if narrow:
            return MoERowsPlan(min(max(8192 // length, 1), 32), min(max(2**15 // held, 1), 32), 4, 8)
        warps = 4 if length <= 4096 else 8, 4 if held <= 2**14 else 8
        return MoERowsPlan(max(2048 // length, 1), max(2**14 // held, 1), *warps)
    mean = num_pairs / num_experts
    height = 16 if mean <= 10 else 32 if mean <= 24 else 64 if mean <= (192 if narrow else 96) else 128
    if narrow:
        return MoETilesPlan(height, *(_TILES_OF_BLOCKS if blocked else _TILES_OF_E4M3)[height])
    if dtype == torch.float32:
        return MoETilesPlan(16, MoETile(32, 32, 4, 2), MoETile(32, 32, 4, 2))
    if not has_room():
        return MoETilesPlan(min(height, 64), MoETile(64, 64, 4, 2), MoETile(64, 64, 4, 2))
    return MoETilesPlan(height, *_TILES[height])
