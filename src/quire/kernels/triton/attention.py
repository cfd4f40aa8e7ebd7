"""Paged attention on a GPU, in two kernels over the caches [num_blocks, block_size, kv_heads, head_dim].

The rows of a tile are all query heads of one key head for some consecutive queries of a sequence, so that a key is
loaded once for all of them. `_tiles` takes one tile of many queries over all its keys: prompts. `_ranges` takes
the few queries of a sequence over one range of its keys, and the last range to finish merges them all: decodes.
Scores are kept in units of log 2. What is masked is not loaded: a slot that nobody wrote may hold anything.
"""

from typing import Any

import triton
import triton.language as tl

_NONE = tl.constexpr(-1.0e30)
"""Less than any score, yet finite: differences of it are no NaN."""


@triton.jit
def _fold(
    state: Any,
    q: Any,
    places: Any,
    k_head: Any,
    v_head: Any,
    table: Any,
    first: Any,
    end: Any,
    limit: Any,
    scale: Any,
    cap: Any,
    block_stride: Any,
    slot_stride: Any,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Any:
    """Take the keys first..end into (sums of values, greatest scores, sums of weights) of the rows, whose queries
    stand at `places`; `MASKED` where a row may not see all of them, or they reach beyond `limit`."""
    acc, most, total = state
    dims = tl.arange(0, acc.shape[1])
    for at in range(first, end, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        exists = keys < limit
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0) if MASKED else tl.load(table + keys // BLOCK_SIZE)
        offsets = blocks.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * slot_stride
        loaded = _loaded(exists, dims, MASKED, DIM)
        k = _load(k_head + offsets[:, None] + dims[None, :], loaded, MASKED or DIM != acc.shape[1]).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = cap - 2 * cap / (tl.exp2(scores * scale) + 1)
        if MASKED:
            seen = keys[None, :] <= places[:, None]
            if WINDOW:
                seen &= keys[None, :] > places[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        factor = 1.0 if CAPPED else scale
        new_most = tl.maximum(most, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_most[:, None])
        shrink = tl.exp2(most - new_most)
        total = total * shrink + tl.sum(weights, 1)
        v = _load(v_head + offsets[:, None] + dims[None, :], loaded, MASKED or DIM != acc.shape[1]).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        most = new_most
    return acc, most, total
