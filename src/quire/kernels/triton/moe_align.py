"""Sort of (token, expert) pairs by expert into tiles, and the MoE layer over sorted pairs."""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import allocate_indices, follow, launch, overlap

Sorted = tuple[Tensor, Tensor]
"""Result of `sort`: indices of the (token, expert) pairs in order of their expert, and the table of tiles."""
_SUMMED = 1024
"""Elements of a token per program of `_sum`."""
_MOST_AHEAD = 256
"""Maximum tokens for which kernels are launched with PDL."""

_CHUNKS = 128, 512, 2048, 4096
"""Number of pairs that a program sorts at a time: the first that is enough for all pairs, or the last."""
_SPANS = 4
"""Maximum programs per expert of `_sort`."""


@triton.jit(do_not_specialize=["num"])
def _count(
    counts: tl.tensor, ids: tl.tensor, num: tl.tensor, CHUNK: tl.constexpr, BINS: tl.constexpr
) -> None:
    """Count the pairs of each expert in a chunk. Grid: (pairs / CHUNK,)."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    experts = tl.load(ids + at, mask=at < num, other=-1)
    row = counts + tl.program_id(0) * BINS + tl.arange(0, BINS)
    tl.store(row, tl.histogram(tl.maximum(experts, 0), BINS, mask=experts >= 0))


@triton.jit(do_not_specialize=["num", "chunks", "span"])
def _sort(
    order: tl.tensor, work: tl.tensor, counts: tl.tensor, ids: tl.tensor, num: tl.tensor, chunks: tl.tensor,
    span: tl.tensor,
    HEIGHT: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, ALONE: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Write the pairs of one expert that lie in `span` chunks to their sorted positions in `order`. Grid:
    (experts, chunks / span).

    The programs of the first chunks also list the tiles of up to HEIGHT pairs in `work`. If `ALONE`, there is
    a single chunk, and `_count` was not launched.
    """
    expert, chunk, bins = tl.program_id(0), tl.program_id(1) * span, tl.arange(0, BINS)
    follow(OVERLAP)
    totals, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    if ALONE:
        at = tl.arange(0, CHUNK)
        experts = tl.load(ids + at, mask=at < num, other=-1)
        totals += tl.histogram(tl.maximum(experts, 0), BINS, mask=experts >= 0)
    else:
        for i in range(chunks):
            row = tl.load(counts + i * BINS + bins)
            totals += row
            before += tl.where(i < chunk, row, 0)
    first = tl.sum(tl.where(bins < expert, totals, 0), 0)
    place = first + tl.sum(tl.where(bins == expert, before, 0), 0)
    for i in range(chunk, tl.minimum(chunk + span, chunks)):
        at = i * CHUNK + tl.arange(0, CHUNK)
        matches = (tl.load(ids + at, mask=at < num, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(matches, 0) - 1, at, mask=matches > 0)
        place += tl.sum(matches, 0)
    if chunk == 0:
        tiles = tl.cdiv(totals, HEIGHT)
        count = tl.sum(tl.where(bins == expert, totals, 0), 0)
        tile = work + 4 + 4 * tl.sum(tl.where(bins < expert, tiles, 0), 0)
        for start in range(0, count, HEIGHT):
            tl.store(tile, expert)
            tl.store(tile + 1, first + start)
            tl.store(tile + 2, first + tl.minimum(start + HEIGHT, count))
            tile += 4
        if expert == 0:
            tl.store(work, tl.sum(tiles, 0))


@triton.jit
def tile_at(order: tl.tensor, work: tl.tensor, tile: tl.tensor, NUM: tl.constexpr) -> tl.tensor:
    """Return for a tile of `sort` its expert, the range start..end of its sorted pairs, and for NUM pairs the
    index before the sort and after it."""
    work += 4 + 4 * tile
    expert, start, end = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    m = start + tl.arange(0, NUM)
    return expert, start, end, tl.load(order + m, mask=m < end, other=0).to(tl.int64), m


def sort(ids: Tensor, num_experts: int, height: int, *, ahead: bool) -> Sorted:
    """Sort the (token, expert) pairs of `ids` by expert, without those with an id below 0 (experts of other
    ranks). Return the indices of the sorted pairs, and the tiles of up to `height` pairs of an expert: their
    number, then from element 4 on for each tile its expert, first sorted pair, end, and padding."""
    num, bins = ids.numel(), triton.next_power_of_2(num_experts)
    chunk = next((size for size in _CHUNKS if num <= size), _CHUNKS[-1])
    chunks = triton.cdiv(num, chunk)
    order = allocate_indices(num, dtype=torch.int32, device=ids.device)
    work = torch.empty(4 + 4 * most_tiles(num, num_experts, height), dtype=torch.int32, device=ids.device)
    counts = order
    if chunks > 1:
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
        launch(_count, chunks)(counts, ids, num, CHUNK=chunk, BINS=bins, num_warps=8)
    span = triton.cdiv(chunks, _SPANS)
    launch(_sort, num_experts, triton.cdiv(chunks, span))(
        order, work, counts, ids, num, chunks, span, HEIGHT=height, CHUNK=chunk, BINS=bins, ALONE=chunks == 1,
        OVERLAP=ahead, launch_pdl=ahead, num_warps=min(max(chunk // 256, 1), 8),
    )  # fmt: skip
    return order, work


def most_tiles(num_pairs: int, num_experts: int, height: int) -> int:
    """Return the maximum number of tiles of `height` pairs, for any distribution of pairs over experts."""
    touched = min(num_pairs, num_experts)
    return touched + (num_pairs - touched) // height


class ExpertGEMM(Protocol):
    """GEMM of a projection of all experts, which writes a row of `out` for each sorted (token, expert) pair,
    from rows x of tokens or of sorted pairs. If `ahead`, its kernels are launched with PDL."""

    def __call__(self, out: Tensor, x: Tensor, pairs: Sorted, *, ahead: bool) -> None: ...


def sorted_mix(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertGEMM,
    down: ExpertGEMM,
    *,
    sizes: tuple[int, int],
    height: int,
) -> Tensor:
    """Compute `mix` of kernels/reference/moe.py, [T, hidden] for x [T, hidden], in tiles of `height` pairs.
    `up` computes act(gate) * up of all pairs, and `down` their down projections. `sizes` are the number of
    experts and the intermediate size."""
    (num, hidden), (num_experts, inner) = x.shape, sizes
    ahead = num <= _MOST_AHEAD and overlap(1)
    activated = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    per_pair = torch.empty(ids.numel(), hidden, dtype=x.dtype, device=x.device)
    out = torch.empty(num, hidden, dtype=x.dtype, device=x.device)
    pairs = sort(ids, num_experts, height, ahead=ahead)
    up(activated, x, pairs, ahead=ahead)
    down(per_pair, activated, pairs, ahead=ahead)
    add(out, per_pair, ids, weights, ahead=ahead)
    return out


def add(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *, ahead: bool) -> None:
    """Write to `out` [T, hidden] for each token the weighted sum of the rows x [pairs, hidden] of its pairs;
    pairs with an id below 0 are skipped."""
    num, hidden = out.shape
    top = weights.shape[1]
    launch(_sum, num, triton.cdiv(hidden, _SUMMED))(
        out, x, ids, weights, hidden, TOP=top, EXPERTS=triton.next_power_of_2(top), BLOCK=_SUMMED,
        OVERLAP=ahead, launch_pdl=ahead,
    )  # fmt: skip


@triton.jit
def _sum(
    out: tl.tensor, x: tl.tensor, ids: tl.tensor, weights: tl.tensor, size: tl.tensor,
    TOP: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute BLOCK elements of `add` for one token. `EXPERTS` >= TOP is a power of two. Grid: (tokens, size
    / BLOCK)."""
    token, rank = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    at, pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), token * TOP + rank
    follow(OVERLAP)
    here = tl.load(ids + pair, mask=rank < TOP, other=-1) >= 0
    exists = here[:, None] & (at < size)[None, :]
    values = tl.load(x + pair[:, None] * size + at[None, :], mask=exists, other=0.0).to(tl.float32)
    share = tl.load(weights + pair, mask=rank < TOP, other=0.0)
    total = tl.sum(values * share[:, None], 0)
    tl.store(out + token * size + at, total.to(out.dtype.element_ty), mask=at < size)
