"""Fused QKV projection, RoPE and KV cache write for a single token.

A program computes some rows of a head's left half and the rows of its right half that are rotated with them.
For more tokens, separate kernels measured faster. Heads with norms need the whole head before the rotation.
In both cases `linear` and `rotate_and_write` run one after the other.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import batch_invariant
from quire.kernels.ops import HeadEntry, LoRAHeads
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.lora import added_to_one
from quire.kernels.triton.ops import angles, limit_of, put
from quire.kernels.triton.tile_dots import LONGEST, scales_of

_NUMBERS = 4096
"""Minimum elements of the weight of each half of a head per program; twice as many for 8-bit weights."""


class _Caches(NamedTuple):
    """KV caches with their scales; strides are in elements."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    block_stride: Any
    slot_stride: Any


@triton.jit
def _enter(
    q: tl.tensor, x: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor, table: tl.tensor,
    positions: tl.tensor, slots: tl.tensor, caches: tl.tuple, size_in: tl.tensor, added: tl.tensor,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr, LIMIT: tl.constexpr, BLOCKED: tl.constexpr, ROWS: tl.constexpr,
    LENGTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS outputs of the left half of a head and the outputs of its right half that RoPE rotates
    with them. Store queries to `q`, keys and values to the KV cache. Grid: (heads, HALF / ROWS)."""
    head, n = tl.program_id(0) + tl.arange(0, 1), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row, k = tl.program_id(0) * (2 * HALF) + n, tl.arange(0, LENGTH)
    at, exist = weight + row.to(tl.int64)[:, None] * size_in + k[None, :], (k < size_in)[None, :]
    left = tl.load(at, mask=exist, other=0.0, eviction_policy="evict_first")
    right = tl.load(at + HALF * size_in, mask=exist, other=0.0, eviction_policy="evict_first")
    to_left, to_right = 0.0, 0.0
    if bias is not None:
        to_left, to_right = tl.load(bias + row).to(tl.float32), tl.load(bias + row + HALF).to(tl.float32)
    first = tl.program_id(0) * (2 * HALF) + tl.program_id(1) * ROWS
    outputs = (Q_HEADS + 2 * KV_HEADS) * 2 * HALF
    left_by_k, left_by_n = scales_of(scale, 0, first, row, k, size_in, outputs, BLOCKED)
    right_by_k, right_by_n = scales_of(scale, 0, first + HALF, row + HALF, k, size_in, outputs, BLOCKED)
    is_q, is_v = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    follow(OVERLAP)
    if added is not None:
        to_left += tl.load(added + row)
        to_right += tl.load(added + row + HALF)
    values = tl.load(x + k, mask=k < size_in, other=0.0).to(tl.float32)
    a = _dot_rows(left, values * left_by_k, left_by_n, to_left, q)
    b = _dot_rows(right, values * right_by_k, right_by_n, to_right, q)
    position, slot = tl.load(positions), tl.load(slots + 0 * head)
    cos, sin = angles(table + position * (2 * HALF), n, ~is_v[:, None], HALF)
    place = slot // BLOCK_SIZE * caches.block_stride + slot % BLOCK_SIZE * caches.slot_stride
    place += (head - tl.where(is_v, Q_HEADS + KV_HEADS, Q_HEADS)) * (2 * HALF)
    is_k, written = ~is_q & ~is_v & (slot >= 0), is_v & (slot >= 0)
    q_offset = head * (2 * HALF)
    where = (q, caches.k, caches.v, q_offset, place, is_q, is_k, written, caches.k_scale, caches.v_scale)
    put(a * cos - b * sin, (n < HALF)[None, :], n, where, SCALED, LIMIT)
    put(b * cos + a * sin, (n < HALF)[None, :], n + HALF, where, SCALED, LIMIT)


@triton.jit
def _dot_rows(
    rows: tl.tensor, values: tl.tensor, scale: tl.tensor, bias: tl.tensor, like: tl.tensor
) -> tl.tensor:
    """Return the outputs [1, rows] of weight `rows` for x (`values`), rounded to the dtype of `like`."""
    sums = tl.sum(rows.to(tl.float32) * values[None, :], 1) * scale + bias
    return sums.to(like.dtype.element_ty).to(tl.float32)[None, :]


def enter(
    x: Tensor,
    entry: HeadEntry,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None = None,
    adapted: LoRAHeads | None = None,
) -> Tensor | None:
    """Project x [T, hidden] to queries, keys and values (x W^T + b plus LoRA outputs), apply RoPE, and write
    the KV cache. Return the queries, or None if this kernel does not support the case, such as several tokens
    or heads with norms. `scale` is that of an e4m3 weight."""
    num, size_in = x.shape
    k, v = entry.k_cache, entry.v_cache
    _, block_size, kv_heads, dim = k.shape
    length = triton.next_power_of_2(size_in)
    item_bytes = 2 if scale is None else 1
    rows = max(2 * _NUMBERS // item_bytes // length, 1)
    if (
        num != 1
        or k.dtype == torch.int8  # the scale of a head needs all its elements
        or batch_invariant.is_on()
        or weight.element_size() != item_bytes
        or length > LONGEST
        or dim // 2 % rows
    ):
        return None
    if entry.norms is not None or entry.table.shape[1] != dim:
        return None
    added = None if adapted is None else added_to_one(x, adapted)
    q = torch.empty(num, entry.heads, dim, dtype=x.dtype, device=x.device)
    caches = _Caches(k, v, entry.k_scale, entry.v_scale, k.stride(0), k.stride(1))
    scaled, ahead = k.element_size() == 1, overlap(num, size_in)
    launch(_enter, entry.heads + 2 * kv_heads, dim // 2 // rows)(
        q, x, weight, scale, bias, entry.table, entry.positions, entry.slots, caches, size_in,
        added, Q_HEADS=entry.heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK_SIZE=block_size, SCALED=scaled,
        LIMIT=limit_of(k), BLOCKED=scale is not None and scale.ndim == 2,
        ROWS=rows, LENGTH=length, OVERLAP=ahead, launch_pdl=ahead, num_warps=4,
    )  # fmt: skip
    return q
