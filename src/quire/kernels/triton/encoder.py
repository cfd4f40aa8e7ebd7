"""Bidirectional attention on a GPU: a tile of queries of one sequence and head attends to all its keys.

A head is split into a power of two of its dimensions and the rest: a head of 80 is 64 and 16, not 128.
"""
# mypy: disable-error-code="untyped-decorator"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.encoder import Angles, Spans
from quire.kernels.triton.launch import launch

_NEVER = tl.constexpr(-1.0e30)
_LOG2_E = 1.4426950408889634
_LEAST = 16
"""Minimum size of a tensor core operand."""
_ALIGNED = 16
"""Token strides must be multiples of this, or Triton 3.6 computes wrong sums for heads in two parts."""


class EncoderShape(NamedTuple):
    """Plan of the attention kernel: `block_n` keys per tile, and compile options."""

    block_n: int
    num_warps: int
    num_stages: int


# Measured on an H200: benchmarks/kernel_vision_encoder.py.
def shape_of(dtype: torch.dtype, dim: int, height: int) -> EncoderShape:
    """Return the shape for tiles of `height` queries and heads of size `dim`."""
    if dtype == torch.float32:
        return EncoderShape(32, 4, 1)
    if height <= 64:
        return EncoderShape(64, 4, 2)
    return EncoderShape(64, 4 if dim <= 96 else 8, 3)


@triton.jit
def _load_dims(
    x: tl.tensor, rows: tl.tensor, exists: tl.tensor,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
) -> Any:  # fmt: skip
    """Load WIDTH dimensions, from FIRST on, of heads of size DIM; with MASKED, only of rows that exist."""
    dims = FIRST + tl.arange(0, WIDTH)
    at = x + rows[:, None] + dims[None, :]
    if MASKED:
        return tl.load(at, mask=exists[:, None] & (dims < DIM)[None, :], other=0.0)
    if FIRST + WIDTH > DIM:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _accumulate(
    sums: tl.tuple, queries: tl.tuple, rows: tl.tensor, k: tl.tensor, v: tl.tensor, k_stride: tl.tensor,
    v_stride: tl.tensor, first: tl.tensor, until: tl.tensor, high: tl.tensor, scale: tl.tensor,
    WINDOW: tl.constexpr, DIM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:  # fmt: skip
    """Process the keys first..until for a tile of queries: update and return each row's `sums`, which are the
    sums of the left and right part of values, the maximum score and the sum of weights. Unless MASKED, the
    keys are whole tiles and every row attends to all of them."""
    left, right, most, total = sums
    for at in range(first, until, BLOCK_N):
        places = at + tl.arange(0, BLOCK_N)
        exists = places < high
        key, value = places.to(tl.int64) * k_stride, places.to(tl.int64) * v_stride
        keys = _load_dims(k, key, exists, 0, LEFT, DIM, MASKED)
        scores = tl.dot(queries[0], tl.trans(keys), input_precision="ieee")
        if RIGHT:
            keys = _load_dims(k, key, exists, LEFT, RIGHT, DIM, MASKED)
            scores = tl.dot(queries[1], tl.trans(keys), scores, input_precision="ieee")
        if MASKED:
            attended = exists[None, :]
            if WINDOW:
                distance = rows[:, None] - places[None, :]
                attended = attended & (distance <= WINDOW) & (distance >= -WINDOW)
            scores = tl.where(attended, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(most - higher)
        total, most = total * shrink + tl.sum(weights, 1), higher
        values = _load_dims(v, value, exists, 0, LEFT, DIM, MASKED)
        weights = weights.to(values.dtype)
        left = tl.dot(weights, values, left * shrink[:, None], input_precision="ieee")
        if RIGHT:
            values = _load_dims(v, value, exists, LEFT, RIGHT, DIM, MASKED)
            right = tl.dot(weights, values, right * shrink[:, None], input_precision="ieee")
    return left, right, most, total


@triton.jit
def _tiles(
    out: tl.tensor, q: tl.tensor, k: tl.tensor, v: tl.tensor, tiles: tl.tensor, q_stride: tl.tensor,
    k_stride: tl.tensor, v_stride: tl.tensor, out_stride: tl.tensor, scale: tl.tensor,
    WINDOW: tl.constexpr, DIM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention of one tile of queries and one head. `tiles` [tiles, 3] is `Spans.tiles`; the tensors
    are [tokens, heads, DIM]. `scale` includes log2(e); WINDOW 0 is none. Grid: (tiles, heads)."""
    tile = tiles + 3 * tl.program_id(0)
    start, end, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    column = tl.program_id(1) * DIM
    rows = first + tl.arange(0, BLOCK_M)
    used = rows < end
    at = rows.to(tl.int64) * q_stride + column
    REST: tl.constexpr = RIGHT if RIGHT else 16
    queries = (
        _load_dims(q, at, used, 0, LEFT, DIM, True),
        _load_dims(q, at, used, LEFT, REST, DIM, True),
    )
    low, high = start, end
    whole = start + (end - start) // BLOCK_N * BLOCK_N
    if WINDOW:
        low, high = tl.maximum(start, first - WINDOW), tl.minimum(end, first + BLOCK_M + WINDOW)
        whole = low
    sums = (
        tl.zeros([BLOCK_M, LEFT], tl.float32),
        tl.zeros([BLOCK_M, REST], tl.float32),
        tl.full([BLOCK_M], _NEVER, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    if WINDOW == 0:
        sums = _accumulate(
            sums, queries, rows, k + column, v + column, k_stride, v_stride, low, whole, high, scale,
            WINDOW, DIM, LEFT, RIGHT, BLOCK_N, False,
        )  # fmt: skip
    left, right, _, total = _accumulate(
        sums, queries, rows, k + column, v + column, k_stride, v_stride, whole, high, high, scale,
        WINDOW, DIM, LEFT, RIGHT, BLOCK_N, True,
    )  # fmt: skip
    inverse = (1.0 / tl.maximum(total, 1e-30))[:, None]
    into = out + (rows.to(tl.int64) * out_stride + column)[:, None]
    dims = tl.arange(0, LEFT)[None, :]
    kind = out.dtype.element_ty
    tl.store(into + dims, (left * inverse).to(kind), mask=used[:, None] & (dims < DIM))
    if RIGHT:
        dims = LEFT + tl.arange(0, REST)[None, :]
        tl.store(into + dims, (right * inverse).to(kind), mask=used[:, None] & (dims < DIM))


def parts_of(dim: int) -> tuple[int, int]:
    """Return the sizes of the two parts of a head of size `dim`, each padded to a power of two; the second is
    0 if one part is enough."""
    left = 1 << (dim.bit_length() - 1)
    right = max(triton.next_power_of_2(dim - left), _LEAST) if dim > left else 0
    return (left, right) if left >= _LEAST and left + right < 2 * left else (max(2 * left, _LEAST), 0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    window: int | None = None,
    shape: EncoderShape | None = None,
) -> Tensor:
    """Compute attention as `kernels.reference.encoder.attend` does, for tensors with contiguous heads."""
    tiles = spans.tiles
    assert tiles is not None, "spans were built for a CPU"
    _, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    assert all(tensor.stride(1) == dim and tensor.stride(2) == 1 for tensor in (q, k, v, out))
    shape = shape or shape_of(q.dtype, dim, spans.height)
    left, right = parts_of(dim)
    if any(tensor.stride(0) % _ALIGNED for tensor in (q, k, v)):
        left, right = max(triton.next_power_of_2(dim), _LEAST), 0
    launch(_tiles, len(tiles), heads)(
        out,
        q,
        k,
        v,
        tiles,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        dim**-0.5 * _LOG2_E,
        WINDOW=window or 0,
        DIM=dim,
        LEFT=left,
        RIGHT=right,
        BLOCK_M=spans.height,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


@triton.jit
def _rotate(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, x_stride: tl.tensor, cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate the first 2 * HALF dimensions of all heads of one token in place. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    c = tl.load(cos + token * cos_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    at, exists = x + token * x_stride + heads * DIM + dims, (heads < HEADS) & (dims < HALF)
    left = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=exists, other=0.0).to(tl.float32)
    tl.store(at, (left * c - right * s).to(x.dtype.element_ty), mask=exists)
    tl.store(at + HALF, (right * c + left * s).to(x.dtype.element_ty), mask=exists)


def rotate(x: Tensor, angles: Angles) -> None:
    """Apply RoPE in place to a tensor with contiguous heads; the reference is `rotate_in_place` of
    `kernels/reference/encoder.py`."""
    num_tokens, heads, dim = x.shape
    cos, sin = angles
    half = cos.shape[1]
    assert x.stride(1) == dim and x.stride(2) == cos.stride(1) == sin.stride(1) == 1
    launch(_rotate, num_tokens)(
        x,
        cos,
        sin,
        x.stride(0),
        cos.stride(0),
        sin.stride(0),
        HEADS=heads,
        DIM=dim,
        HALF=half,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(half),
        num_warps=4,
    )
