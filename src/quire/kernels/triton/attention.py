"""Paged attention on a GPU, in two kernels over caches [num_blocks, block_size, kv_heads, head_dim].

The rows of a tile are all query heads of one key head for some consecutive queries of a sequence: a key is
loaded once for all of them. `tiles` takes a tile of many queries over all its keys: prompts. `ranges` takes
the few queries of a sequence over one range of its keys; the last to finish merges all ranges: decodes.

Scores are in units of log 2. Slots that nobody wrote may hold anything: they are not loaded.
"""
# mypy: disable-error-code="untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

_NEVER = tl.constexpr(-1.0e30)
"""Less than any score, yet finite: the difference of two is no NaN."""
_LOG2_E = tl.constexpr(1.4426950408889634)


class Cache(NamedTuple):
    """One layer's keys and values; strides in elements."""

    k: Any
    v: Any
    block_stride: Any
    slot_stride: Any


class Seqs(NamedTuple):
    """`Batch`'s tensors of the same names."""

    query_starts: Any
    seq_lens: Any
    rows: Any
    block_tables: Any
    table_stride: Any


class Scores(NamedTuple):
    scale: Any
    """From a product of query and key to log 2; with a cap from there to twice the argument of tanh."""
    cap: Any
    v_scale: Any


class Partial(NamedTuple):
    """What the ranges of a sequence leave for the merger."""

    sums: Any
    """[sequences, kv_heads, ranges, rows, head_dim] float32"""
    tops: Any
    """[sequences, kv_heads, ranges, 2, rows] float32: greatest score, sum of weights"""
    arrivals: Any
    """[sequences, kv_heads] int32, zeros before and after"""


@triton.jit
def _fold(
    acc: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    places: tl.tensor,
    cache: tl.tuple,
    kv_head: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scores_by: tl.tuple,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Any:
    """Take the keys first..end into each row's sum of values, greatest score and sum of weights.

    The rows' queries stand at `places`. Without `MASKED` all of them see all these keys, in whole tiles.
    """
    dims, key = tl.arange(0, acc.shape[1]), tl.arange(0, BLOCK_N)
    # Blocks are looked up one turn ahead: the keys' own loads then need not wait for them.
    blocks = tl.load(table + (first + key) // BLOCK_SIZE, mask=first + key < end, other=0)
    for at in range(first, end, BLOCK_N):
        keys = at + key
        exists = keys < end
        slots = blocks.to(tl.int64) * cache.block_stride + (keys % BLOCK_SIZE) * cache.slot_stride
        slots = slots[:, None] + kv_head * DIM + dims[None, :]
        blocks = tl.load(table + (keys + BLOCK_N) // BLOCK_SIZE, mask=keys + BLOCK_N < end, other=0)
        k = _load(cache.k + slots, exists, dims, MASKED, DIM).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = scores_by.scale
        if CAPPED:
            scores = scores_by.cap - 2 * scores_by.cap / (tl.exp2(scores * factor) + 1)
            factor = 1.0
        if MASKED:
            seen = (keys[None, :] <= places[:, None]) & exists[None, :]
            if WINDOW:
                seen &= keys[None, :] > places[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weights, 1)
        v = _load(cache.v + slots, exists, dims, MASKED, DIM).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        most = higher
    return acc, most, total


@triton.jit
def _load(at: tl.tensor, exists: tl.tensor, dims: tl.tensor, MASKED: tl.constexpr, DIM: tl.constexpr) -> Any:
    """[keys, dims] at these addresses, zeros where there are none."""
    if MASKED:
        return tl.load(at, mask=exists[:, None] & (dims[None, :] < DIM), other=0.0)
    elif at.shape[1] != DIM:
        return tl.load(at, mask=dims[None, :] < DIM, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _rows(
    kv_head: tl.tensor, low: tl.tensor, high: tl.tensor, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
) -> Any:
    """Of each row of a tile: its query in the tile, the place of that, its head, whether there is one."""
    row = tl.arange(0, BLOCK_M)
    query = row // GROUP
    valid = (low + query < high) & (query < BLOCK_M // GROUP)
    return query, tl.minimum(low + query, high - 1), kv_head * GROUP + row % GROUP, valid


@triton.jit
def _start(sinks: tl.tensor, heads: tl.tensor, counts: tl.tensor, BLOCK_D: tl.constexpr) -> Any:
    """The rows before any key; where it `counts`, a sink is a key without a value."""
    acc = tl.zeros([heads.shape[0], BLOCK_D], tl.float32)
    most = tl.full([heads.shape[0]], _NEVER, tl.float32)
    total = tl.zeros([heads.shape[0]], tl.float32)
    if sinks is not None:
        most = tl.where(counts, tl.load(sinks + heads).to(tl.float32) * _LOG2_E, most)
        total = tl.where(counts, 1.0, total)
    return acc, most, total


@triton.jit
def _finish(
    out: tl.tensor, acc: tl.tensor, total: tl.tensor, v_scale: tl.tensor, at: tl.tensor, valid: tl.tensor
) -> None:
    result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def tiles(
    out: tl.tensor,
    q: tl.tensor,
    q_stride: tl.tensor,
    cache: tl.tuple,
    seqs: tl.tuple,
    work: tl.tensor,
    sinks: tl.tensor,
    scores_by: tl.tuple,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Grid (tiles, kv_heads). `work` [tiles, 2]: the sequence, and which of its queries comes first."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq, skipped = tl.load(work + 2 * tile), tl.load(work + 2 * tile + 1)
    start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
    low = seq_len - (tl.load(seqs.query_starts + seq + 1) - start) + skipped
    high = tl.minimum(low + BLOCK_M // GROUP, seq_len)
    query, places, heads, valid = _rows(kv_head, low, high, GROUP, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = (start + skipped + query).to(tl.int64)
    valid = valid[:, None] & (dims[None, :] < DIM)
    rows = tl.load(
        q + token[:, None] * q_stride + (heads * DIM)[:, None] + dims[None, :], mask=valid, other=0.0
    )
    table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
    acc, most, total = _start(sinks, heads, tile >= 0, BLOCK_D)
    # Between the keys that only some rows see lie those that all see.
    whole = 0
    if WINDOW:
        first = tl.maximum(low - WINDOW + 1, 0)
        whole = first + tl.cdiv(tl.maximum(high - WINDOW - first, 0), BLOCK_N) * BLOCK_N
        whole = tl.minimum(whole, high)
        acc, most, total = _fold(
            acc, most, total, rows, places, cache, kv_head, table, first, whole, scores_by,
            True, WINDOW, CAPPED, DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    diagonal = whole + tl.maximum(low + 1 - whole, 0) // BLOCK_N * BLOCK_N
    acc, most, total = _fold(
        acc, most, total, rows, places, cache, kv_head, table, whole, diagonal, scores_by,
        False, WINDOW, CAPPED, DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc, most, total = _fold(
        acc, most, total, rows, places, cache, kv_head, table, diagonal, high, scores_by,
        True, WINDOW, CAPPED, DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    at = (token[:, None] * (tl.num_programs(1) * GROUP) + heads[:, None]) * DIM + dims[None, :]
    _finish(out, acc, total, scores_by.v_scale, at, valid)


@triton.jit
def ranges(
    out: tl.tensor,
    q: tl.tensor,
    q_stride: tl.tensor,
    cache: tl.tuple,
    seqs: tl.tuple,
    work: tl.tensor,
    sinks: tl.tensor,
    scores_by: tl.tuple,
    partial: tl.tuple,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
) -> None:
    """Grid (kv_heads, sequences, ranges). `work` [sequences] are the sequences meant; None: all of the batch.

    A sequence uses no more ranges than it has keys for; one without keys gets zeros.
    """
    kv_head, index, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = index
    if work is not None:
        seq = tl.load(work + index)
    start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
    low = tl.maximum(seq_len - (tl.load(seqs.query_starts + seq + 1) - start), 0)
    first = 0
    if WINDOW:
        first = tl.maximum(low - WINDOW + 1, 0)
    size = tl.maximum(tl.cdiv(seq_len - first, tl.num_programs(2)), MIN_KEYS)
    size = tl.cdiv(size, BLOCK_N) * BLOCK_N
    parts = tl.maximum(tl.cdiv(seq_len - first, size), 1)
    if part < parts:
        query, places, heads, valid = _rows(kv_head, low, tl.maximum(seq_len, 1), GROUP, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        token = (start + query).to(tl.int64)
        valid = valid[:, None] & (dims[None, :] < DIM)
        rows = tl.load(
            q + token[:, None] * q_stride + (heads * DIM)[:, None] + dims[None, :], mask=valid, other=0.0
        )
        table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
        acc, most, total = _start(sinks, heads, part == 0, BLOCK_D)
        first += part * size
        acc, most, total = _fold(
            acc, most, total, rows, places, cache, kv_head, table, first, tl.minimum(first + size, seq_len),
            scores_by, True, WINDOW, CAPPED, DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        at = (token[:, None] * (tl.num_programs(0) * GROUP) + heads[:, None]) * DIM + dims[None, :]
        if parts > 1:
            acc, total, valid = _merge(partial, acc, most, total, valid, index, kv_head, part, parts, DIM)
        _finish(out, acc, total, scores_by.v_scale, at, valid)


@triton.jit
def _merge(
    partial: tl.tuple,
    acc: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    valid: tl.tensor,
    index: tl.tensor,
    kv_head: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    DIM: tl.constexpr,
) -> Any:
    """Leave this range's part; whoever comes last gets the sum of all, the others nothing that is valid."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    row, dims = tl.arange(0, BLOCK_M), tl.arange(0, acc.shape[1])
    group = index * tl.num_programs(0) + kv_head
    base = (group * tl.num_programs(2)).to(tl.int64)
    inside = row[:, None] * DIM + dims[None, :]
    tl.store(partial.sums + (base + part) * (BLOCK_M * DIM) + inside, acc, mask=valid)
    tl.store(partial.tops + (base + part) * (2 * BLOCK_M) + row, most)
    tl.store(partial.tops + (base + part) * (2 * BLOCK_M) + BLOCK_M + row, total)
    tl.debug_barrier()
    last = tl.atomic_add(partial.arrivals + group, 1, sem="acq_rel") == parts - 1
    if last:
        acc = tl.zeros_like(acc)
        most = tl.full([BLOCK_M], _NEVER, tl.float32)
        total = tl.zeros_like(total)
        for other in range(parts):
            tops = partial.tops + (base + other) * (2 * BLOCK_M) + row
            top = tl.load(tops, cache_modifier=".cg")
            count = tl.load(tops + BLOCK_M, cache_modifier=".cg")
            sums = partial.sums + (base + other) * (BLOCK_M * DIM) + inside
            sums = tl.load(sums, mask=valid, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(most, top)
            shrink, weight = tl.exp2(most - higher), tl.exp2(top - higher)
            acc = acc * shrink[:, None] + sums * weight[:, None]
            total = total * shrink + count * weight
            most = higher
        tl.store(partial.arrivals + group, 0)
    return acc, total, valid & last
