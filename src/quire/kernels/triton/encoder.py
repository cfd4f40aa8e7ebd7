"""Attention in both directions on a GPU: a tile of queries of one sequence and head over all its keys."""
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.encoder import TILE, Spans
from quire.kernels.triton.launch import launch

_NEVER = tl.constexpr(-1.0e30)
_LOG2_E = 1.4426950408889634


@triton.jit
def _tiles(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    out_stride: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Scores are in units of log 2. WINDOW 0 is none; WIDTH is DIM, rounded up to a power of two."""
    tile = tiles + 3 * tl.program_id(0)
    start, end, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    dims = tl.arange(0, WIDTH)
    columns = tl.program_id(1) * DIM + dims
    rows = first + tl.arange(0, BLOCK_M)
    used = (rows < end)[:, None] & (dims < DIM)
    queries = tl.load(q + rows.to(tl.int64)[:, None] * q_stride + columns, mask=used, other=0.0)
    low, high = start, end
    if WINDOW > 0:
        low, high = tl.maximum(start, first - WINDOW), tl.minimum(end, first + BLOCK_M + WINDOW)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    most = tl.full([BLOCK_M], _NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in range(low, high, BLOCK_N):
        places = at + tl.arange(0, BLOCK_N)
        there = (places < high)[:, None] & (dims < DIM)
        at_key = places.to(tl.int64)[:, None]
        keys = tl.load(k + at_key * k_stride + columns, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        seen = (places < high)[None, :] & (rows < end)[:, None]
        if WINDOW > 0:
            away = rows[:, None] - places[None, :]
            seen = seen & (away <= WINDOW) & (away >= -WINDOW)
        scores = tl.where(seen, scores, _NEVER)
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(most - higher)
        values = tl.load(v + at_key * v_stride + columns, mask=there, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        most = higher
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    into = out + rows.to(tl.int64)[:, None] * out_stride + columns
    tl.store(into, acc.to(out.dtype.element_ty), mask=used)


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None = None) -> Tensor:
    """`kernels.encoder.attend`, of tensors whose heads lie side by side."""
    tiles = spans.tiles
    assert tiles is not None, "made for a CPU"
    _, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    assert all(each.stride(1) == dim and each.stride(2) == 1 for each in (q, k, v, out))
    launch(_tiles, len(tiles), heads)(
        q,
        k,
        v,
        out,
        tiles,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        dim**-0.5 * _LOG2_E,
        WINDOW=window or 0,
        DIM=dim,
        WIDTH=max(triton.next_power_of_2(dim), 16),
        BLOCK_M=TILE,
        BLOCK_N=32 if q.dtype == torch.float32 else 64,
        num_warps=4,
    )
    return out
