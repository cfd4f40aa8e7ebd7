"""Paged attention of the batch-invariant mode: each query adds its keys in one order, in prefill and decode.

Keys are processed in tiles that begin at multiples of BLOCK_N. A query's keys are divided into splits, which
begin at multiples of their length. The length depends on the query's position only (`split_of`). The results
of the splits are added one after the other. `fixed_tiles` does so for a tile of many queries. `fixed_shares`
is for sequences with few queries: programs take an equal number of splits each. If the splits of a sequence
belong to several programs, the last of these programs to finish adds their results.
"""
# mypy: disable-error-code="untyped-decorator"

from typing import Any

import triton
import triton.language as tl

from quire.kernels.triton.attention import (
    NEVER,
    alibi_of,
    finish,
    head_step,
    initial,
    load_blocks,
    load_queries,
    load_values,
    online_softmax,
    scores_of,
    slot_offsets,
)
from quire.kernels.triton.launch import follow
from quire.kernels.triton.split_kv_shares import first_key, last_passed

_SEQS_AT_ONCE = tl.constexpr(256)
"""Number of sequences whose splits a program counts at once."""
_DOUBLINGS = tl.constexpr(12)
"""Splits of at most 2^12 times the shortest length: enough for 16 million keys."""


@triton.jit
def split_of(places: tl.tensor, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """Return the number of keys per split for queries at positions `places`. It is SPLIT, doubled until the
    keys of a query are at most MOST splits (one more with a window)."""
    keys = tl.minimum(places + 1, WINDOW) if WINDOW else places + 1
    size = keys * 0 + SPLIT
    for _ in tl.static_range(_DOUBLINGS):
        size = tl.where(keys > size * MOST, 2 * size, size)
    return size


@triton.jit
def _fold(
    out: tl.tensor, out_most: tl.tensor, out_total: tl.tensor, acc: tl.tensor, most: tl.tensor,
    total: tl.tensor, ends: tl.tensor,
) -> Any:  # fmt: skip
    """Merge the results of splits that are complete: for the rows where `ends` is true, add the result of the
    current split (`acc`, `most`, `total`) to that of the splits before it (`out`, `out_most`, `out_total`). A
    result is a sum of values, a maximum score and a sum of weights. Return both; the split's is reset in
    these rows."""
    higher = tl.maximum(out_most, most)
    shrink = tl.where(ends, tl.exp2(out_most - higher), 1.0)
    weight = tl.where(ends, tl.exp2(most - higher), 0.0)
    rest = tl.where(ends, 0.0, 1.0)
    out = tl.fma(out, tl.broadcast_to(shrink[:, None], out.shape), acc * weight[:, None])
    out_total = tl.fma(out_total, shrink, total * weight)
    out_most = tl.where(ends, higher, out_most)
    return out, out_most, out_total, acc * rest[:, None], tl.where(ends, NEVER, most), total * rest


@triton.jit
def _add(
    out: tl.tensor, out_most: tl.tensor, out_total: tl.tensor, acc: tl.tensor, most: tl.tensor,
    total: tl.tensor,
) -> Any:  # fmt: skip
    """Add the result of a split (`acc`, `most`, `total`) to that of the splits before it, for all rows, and
    return the result of all: a sum of values, a maximum score and a sum of weights."""
    out, out_most, out_total, acc, most, total = _fold(
        out, out_most, out_total, acc, most, total, out_most == out_most
    )
    return out, out_most, out_total


@triton.jit
def _accumulate(
    out: tl.tensor, out_most: tl.tensor, out_total: tl.tensor, q: tl.tensor, sizes: tl.tensor, low: tl.tensor,
    places: tl.tensor, last: tl.tensor, alibi_slopes: tl.tensor, cache: tl.tuple, kv_head: tl.tensor,
    table: tl.tensor, first: tl.tensor, end: tl.tensor, scores_by: tl.tuple,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
) -> Any:  # fmt: skip
    """Accumulate the keys first..end, where `first` is a multiple of BLOCK_N. The splits of a row have
    `sizes` [rows] keys; splits that end before the last tile are added to `out`. Return `out` and the result
    of the last split, each with its maximum score and sum of weights."""
    BLOCK_D: tl.constexpr = out.shape[1]
    acc = tl.zeros(out.shape, tl.float32)
    most = tl.full([out.shape[0]], NEVER, tl.float32)
    total = tl.zeros([out.shape[0]], tl.float32)
    key, lowest = tl.arange(0, BLOCK_N), first_key(low, WINDOW, CHUNKED)
    KIND: tl.constexpr = cache.k.dtype.element_ty
    if KIND.primitive_bitwidth == 8 and tl.int8 != KIND and q.dtype != tl.float32:
        q = q.to(tl.float16)
    blocks = load_blocks(table, first + key, end, BLOCK_SIZE)
    for offset in range(0, end - first, BLOCK_N):
        at = first + offset
        slots = slot_offsets(cache, blocks, at + key, BLOCK_SIZE) + kv_head * head_step(KIND, DIM)
        blocks = load_blocks(table, at + BLOCK_N + key, end, BLOCK_SIZE)
        exists = at + key < end
        if WINDOW:
            exists &= at + key >= lowest
        scores = scores_of(q, cache.k, slots, exists, BLOCK_D, DIM)
        if (at > first) & (at % SPLIT == 0):
            ends = (at & (sizes - 1)) == 0
            out, out_most, out_total, acc, most, total = _fold(
                out, out_most, out_total, acc, most, total, ends
            )
        shrink, most, total, weights = online_softmax(
            scores, most, total, at, end, low, places, last, alibi_slopes, scores_by,
            WINDOW, CHUNKED, CAPPED, BLOCK_N,
        )  # fmt: skip
        v = load_values(cache.v, slots, exists, BLOCK_D, DIM, q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return out, out_most, out_total, acc, most, total


@triton.jit
def _first_tile(low: tl.tensor, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_N: tl.constexpr) -> Any:
    """Return the first key of the tile in which the keys of a query at position `low` begin."""
    return first_key(low, WINDOW, CHUNKED) // BLOCK_N * BLOCK_N


@triton.jit
def _offsets(
    start: tl.tensor, heads: tl.tensor, kv_heads: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
) -> Any:  # fmt: skip
    """Return for each element of a tile its offset in the output. Kernels compute it after their loop over
    keys, to save registers in the loop."""
    token = (start + tl.arange(0, heads.shape[0]) // GROUP).to(tl.int64)
    return ((token * (kv_heads * GROUP) + heads) * DIM)[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def fixed_tiles(
    out: tl.tensor, q: tl.tensor, q_stride: tl.tensor, cache: tl.tuple, seqs: tl.tuple, work: tl.tensor,
    sinks: tl.tensor, alibi_slopes: tl.tensor, reach: tl.tensor, scores_by: tl.tuple,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, MOST: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention of one tile of queries to all its keys, as `attention.tiles` does. Grid: (tiles,
    kv_heads)."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq, skipped = tl.load(work + 2 * tile), tl.load(work + 2 * tile + 1)
    start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
    low = seq_len - (tl.load(seqs.query_starts + seq + 1) - start) + skipped
    high = tl.minimum(low + BLOCK_M // GROUP, seq_len)
    rows, places, heads, _, valid = load_queries(
        q, q_stride, kv_head, tl.num_programs(1), start + skipped, low, high, GROUP, DIM, BLOCK_D, BLOCK_M
    )
    table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
    result, top, total = initial(sinks, heads, tile >= 0, BLOCK_D)
    last, end = places, high
    if reach is not None:
        last = tl.load(reach + start + skipped + (places - low))
        end = tl.max(last, 0) + 1
    sizes = split_of(places, WINDOW, SPLIT, MOST)
    result, top, total, acc, most, count = _accumulate(
        result, top, total, rows, sizes, low, places, last, alibi_of(alibi_slopes, heads), cache, kv_head,
        table, _first_tile(low, WINDOW, CHUNKED, BLOCK_N), end, scores_by,
        WINDOW, CHUNKED, CAPPED, DIM, BLOCK_SIZE, BLOCK_N, SPLIT,
    )  # fmt: skip
    result, top, total = _add(result, top, total, acc, most, count)
    at = _offsets(start + skipped, heads, tl.num_programs(1), GROUP, DIM, BLOCK_D)
    finish(out, result, total, scores_by.v_scale, at, valid)


@triton.jit
def _splits_of(
    seq_lens: tl.tensor, num_queries: tl.tensor, second: tl.tensor,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the number of splits of a sequence, the keys per split, and the index of the first split. The
    queries of a sequence have at most two split lengths: that of the first query, and if `second` that of the
    last query. With `second` the number is 0 if both lengths are equal."""
    low = tl.maximum(seq_lens - num_queries, 0)
    size = split_of(low, WINDOW, SPLIT, MOST)
    longer = split_of(tl.maximum(seq_lens - 1, 0), WINDOW, SPLIT, MOST)
    is_none = second & (longer == size)
    size = tl.where(second, longer, size)
    earliest = first_key(low, WINDOW, CHUNKED) // size
    count = tl.maximum(tl.cdiv(seq_lens, size) - earliest, 1)
    return tl.where(is_none, 0, count), size, earliest


@triton.jit
def _count_some(
    seqs: tl.tuple, work: tl.tensor, items: tl.tensor, num_items: tl.tensor,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr, KINDS: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the number of splits of each of `items`, 0 beyond the last item. An item is a sequence with one
    of the split lengths of its queries; see `fixed_shares`."""
    valid, index = items < num_items, items // KINDS
    seq = index if work is None else tl.load(work + index, mask=valid, other=0)
    num_queries = tl.load(seqs.query_starts + seq + 1, mask=valid, other=0)
    num_queries -= tl.load(seqs.query_starts + seq, mask=valid, other=0)
    seq_lens = tl.load(seqs.seq_lens + seq, mask=valid, other=0)
    count, _, _ = _splits_of(seq_lens, num_queries, items % KINDS == 1, WINDOW, CHUNKED, SPLIT, MOST)
    return tl.where(valid, count, 0)


@triton.jit
def _share(
    seqs: tl.tuple, work: tl.tensor, num_items: tl.tensor,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr, KINDS: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the range at..end of splits that this program processes, numbered over all items (see
    `fixed_shares`), the item in which the range begins, and the first split of that item."""
    offsets = tl.arange(0, _SEQS_AT_ONCE)
    ends = tl.cumsum(_count_some(seqs, work, offsets, num_items, WINDOW, CHUNKED, SPLIT, MOST, KINDS), 0)
    before = tl.max(ends, 0)
    total = before
    for first in range(_SEQS_AT_ONCE, num_items, _SEQS_AT_ONCE):
        some = _count_some(seqs, work, first + offsets, num_items, WINDOW, CHUNKED, SPLIT, MOST, KINDS)
        total += tl.sum(some, 0)
    size = tl.cdiv(total, tl.num_programs(1))
    at = tl.program_id(1) * size
    passed = last_passed(at, ends, offsets)
    for first in range(_SEQS_AT_ONCE, num_items, _SEQS_AT_ONCE):
        some = _count_some(seqs, work, first + offsets, num_items, WINDOW, CHUNKED, SPLIT, MOST, KINDS)
        ends = before + tl.cumsum(some, 0)
        passed, before = tl.maximum(passed, last_passed(at, ends, first + offsets)), tl.max(ends, 0)
    return at, tl.minimum(at + size, total), passed.to(tl.int32), (passed >> 32).to(tl.int32)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["work"])
def fixed_shares(
    out: tl.tensor, q: tl.tensor, q_stride: tl.tensor, cache: tl.tuple, seqs: tl.tuple, work: tl.tensor,
    num_seqs: tl.tensor, sinks: tl.tensor, alibi_slopes: tl.tensor, scores_by: tl.tuple, partial: tl.tuple,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, MOST: tl.constexpr, KINDS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention over some splits of sequences with few queries. Grid: (kv_heads, programs).

    `work` [num_seqs] lists the sequences; None selects the first `num_seqs` of the batch. The queries of a
    sequence have up to KINDS split lengths; a sequence with one of its lengths is an item. `partial` has ROWS
    rows for each split of each item."""
    kv_head, num_items = tl.program_id(0), num_seqs * KINDS
    at, end, item, begin = _share(seqs, work, num_items, WINDOW, CHUNKED, SPLIT, MOST, KINDS)
    follow(OVERLAP)
    while at < end:
        seq = item // KINDS if work is None else tl.load(work + item // KINDS)
        start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
        num_queries = tl.load(seqs.query_starts + seq + 1) - start
        table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
        count, size, earliest = _splits_of(
            seq_len, num_queries, item % KINDS == 1, WINDOW, CHUNKED, SPLIT, MOST
        )
        low = tl.maximum(seq_len - num_queries, 0)
        rows, places, heads, _, valid = load_queries(
            q, q_stride, kv_head, tl.num_programs(0), start, low, tl.maximum(seq_len, 1), GROUP, DIM, BLOCK_D,
            BLOCK_M,
        )  # fmt: skip
        sizes = split_of(places, WINDOW, SPLIT, MOST)
        valid &= (tl.where(count > 0, sizes, 0) == size)[:, None]
        # The splits of an item are added in one loop if they are all in this program, else stored one by one.
        is_whole = (at == begin) & (begin + count <= end)
        until = tl.where(is_whole, begin + count, at + 1)
        result, top, total = initial(sinks, heads, kv_head >= 0, BLOCK_D)
        result, top, total, acc, most, weight = _accumulate(
            result, top, total, rows, sizes, low, places, places, alibi_of(alibi_slopes, heads), cache,
            kv_head, table,
            tl.maximum((earliest + at - begin) * size, _first_tile(low, WINDOW, CHUNKED, BLOCK_N)),
            tl.minimum((earliest + until - begin) * size, seq_len), scores_by,
            WINDOW, CHUNKED, CAPPED, DIM, BLOCK_SIZE, BLOCK_N, SPLIT,
        )  # fmt: skip
        is_last = is_whole
        if is_whole:
            result, top, total = _add(result, top, total, acc, most, weight)
        else:
            index = kv_head * num_items + item
            _store(partial, index * (MOST + 2) + at - begin, acc, most, weight, valid, ROWS, DIM)
            tl.debug_barrier()  # all threads must have written before the arrival is counted
            is_last = tl.atomic_add(partial.arrivals + index, 1, sem="acq_rel") == count - 1
            if is_last:
                tl.store(partial.arrivals + index, 0)
                for split in range(count):
                    acc, most, weight = _load(partial, index * (MOST + 2) + split, valid, ROWS, DIM)
                    result, top, total = _add(result, top, total, acc, most, weight)
        if is_last:
            place = _offsets(start, heads, tl.num_programs(0), GROUP, DIM, BLOCK_D)
            finish(out, result, total, scores_by.v_scale, place, valid)
        at = until
        if at >= begin + count:
            begin, item = begin + count, item + 1


@triton.jit
def _places(
    partial: tl.tuple, piece: tl.tensor, valid: tl.tensor, ROWS: tl.constexpr, DIM: tl.constexpr
) -> Any:
    """Return the pointers of a split's sums, maxima and totals, and which rows exist."""
    row, dims = tl.arange(0, valid.shape[0]), tl.arange(0, valid.shape[1])
    at = piece.to(tl.int64) * ROWS + row
    return partial.sums + at[:, None] * DIM + dims[None, :], partial.tops + 2 * at, row < ROWS


@triton.jit
def _store(
    partial: tl.tuple, piece: tl.tensor, acc: tl.tensor, most: tl.tensor, total: tl.tensor, valid: tl.tensor,
    ROWS: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    sums, tops, exists = _places(partial, piece, valid, ROWS, DIM)
    tl.store(sums, acc, mask=valid & exists[:, None])
    tl.store(tops, most, mask=exists)
    tl.store(tops + 1, total, mask=exists)


@triton.jit
def _load(
    partial: tl.tuple, piece: tl.tensor, valid: tl.tensor, ROWS: tl.constexpr, DIM: tl.constexpr
) -> Any:
    sums, tops, exists = _places(partial, piece, valid, ROWS, DIM)
    part = tl.load(sums, mask=valid & exists[:, None], other=0.0, cache_modifier=".cg")
    top = tl.load(tops, mask=exists, other=NEVER, cache_modifier=".cg")
    return part, top, tl.load(tops + 1, mask=exists, other=0.0, cache_modifier=".cg")
