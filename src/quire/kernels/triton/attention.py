"""Paged attention of prompts on a GPU, over caches [num_blocks, block_size, kv_heads, head_dim].

Heads of an int8 cache have 4 more bytes, the float32 scale of the head. The rows of a tile are all query
heads of one KV head for some consecutive queries of a sequence. A key is loaded once for all of these rows.
`tiles` processes a tile of many queries over all its keys (prefill). The kernel of sequences with few queries
(decode) is in `split_kv.py`.

Scores are scaled by log2(e), so that softmax weights are powers of 2. Cache slots that were never written
have arbitrary contents and are not loaded.
"""
# mypy: disable-error-code="untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.split_kv_shares import first_key

NEVER = tl.constexpr(-1.0e30)
"""Less than any score, yet finite, so that the difference of two such values is not NaN."""
_LOG2_E = tl.constexpr(1.4426950408889634)


class Cache(NamedTuple):
    """Key and value cache of one layer, as kernel arguments; the strides of blocks and slots are in
    elements."""

    k: Any
    v: Any
    block_stride: Any
    slot_stride: Any


class AttentionSeqs(NamedTuple):
    """Sequences of a batch, as kernel arguments: the fields of `Batch` with the names of the first four
    fields, and the row stride of `block_tables` in elements."""

    query_starts: Any
    seq_lens: Any
    rows: Any
    block_tables: Any
    table_stride: Any


class Scores(NamedTuple):
    """Scale and softcap of attention scores, and scale of the cached values."""

    scale: Any
    """Factor of q k^T, which includes log2(e); with a softcap, it gives twice the argument of tanh."""
    cap: Any
    v_scale: Any


class PieceResults(NamedTuple):
    """Results of the pieces of cut tiles of prompts, as kernel arguments. The last program of a tile merges
    those of all its pieces."""

    sums: Any
    """[results, kv_heads, rows, head_dim] float32"""
    tops: Any
    """[results, kv_heads, 2, rows] float32: maximum score, sum of softmax weights"""
    arrivals: Any
    """[results, kv_heads] int32, number of finished pieces of a tile, indexed by its first result; zeros
    before and after each launch"""


class PartialAttention(NamedTuple):
    """Partial results of sequences whose keys lie in several shares. A share is the keys that one program of
    split-KV decode processes. It has up to two partial results: of a sequence that begins in an earlier
    share, and of one that continues in the next share. The last program of a sequence merges its results."""

    sums: Any
    """[kv_heads, shares, 2, rows, head_dim] float32"""
    tops: Any
    """[kv_heads, shares, 2, 2, rows] float32: maximum score, sum of softmax weights"""
    arrivals: Any
    """[kv_heads, shares] int32, number of finished shares of a sequence, indexed by the share in which the
    sequence begins; zeros before and after each launch"""


@triton.jit
def accumulate(
    acc: tl.tensor, most: tl.tensor, total: tl.tensor, q: tl.tensor, low: tl.tensor, places: tl.tensor,
    last: tl.tensor, alibi_slopes: tl.tensor, cache: tl.tuple, kv_head: tl.tensor, table: tl.tensor,
    first: tl.tensor, end: tl.tensor, scores_by: tl.tuple,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> Any:  # fmt: skip
    """Accumulate the keys first..end into each row's sum of values `acc` [rows, head_dim], maximum score
    `most` [rows] and sum of softmax weights `total` [rows]. Return all three.

    The queries of the rows are at positions `places` [rows], of which `low` is the lowest, and attend to keys
    up to `last`; for `alibi_slopes` see `online_softmax`.
    """
    key = tl.arange(0, BLOCK_N)
    # 8-bit values convert to float16 in one instruction. Two dimensions are loaded as one 16-bit number,
    # because the transposition for the tensor cores works on 16 bits.
    KIND: tl.constexpr = cache.v.dtype.element_ty
    NARROW: tl.constexpr = KIND.primitive_bitwidth == 8 and tl.int8 != KIND and q.dtype != tl.float32
    PAIRS: tl.constexpr = NARROW and acc.shape[0] < 64
    if NARROW:
        q = q.to(tl.float16)
    if PAIRS:
        odd = tl.zeros([acc.shape[0], acc.shape[1] // 2], tl.float32)
        even = odd
    # Block ids are loaded one iteration ahead, so that the loads of keys do not wait for them.
    blocks = load_blocks(table, first + key, end, BLOCK_SIZE)
    for at in range(first, end, BLOCK_N):
        slots = slot_offsets(cache, blocks, at + key, BLOCK_SIZE) + kv_head * head_step(KIND, DIM)
        blocks = load_blocks(table, at + BLOCK_N + key, end, BLOCK_SIZE)
        scores = scores_of(q, cache.k, slots, at + key < end, acc.shape[1], DIM)
        shrink, most, total, weights = online_softmax(
            scores, most, total, at, end, low, places, last, alibi_slopes, scores_by,
            WINDOW, CHUNKED, CAPPED, BLOCK_N,
        )  # fmt: skip
        if PAIRS:
            pairs = cache.v.to(tl.pointer_type(tl.uint16), bitcast=True)
            v = load_slots(pairs, slots // 2, at + key < end, acc.shape[1] // 2, DIM // 2)
            even = tl.dot(weights.to(q.dtype), _float16(v, KIND), even * shrink[:, None])
            odd = tl.dot(weights.to(q.dtype), _float16(v >> 8, KIND), odd * shrink[:, None])
        else:
            v = load_values(cache.v, slots, at + key < end, acc.shape[1], DIM, q.dtype)
            acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    if PAIRS:
        acc = tl.reshape(tl.join(even, odd), acc.shape)
    return acc, most, total


@triton.jit
def _float16(narrow: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Convert to float16 the lower byte of each integer, which is an 8-bit float of type KIND."""
    return narrow.to(tl.uint8).to(KIND, bitcast=True).to(tl.float16)


@triton.jit
def load_blocks(table: tl.tensor, keys: tl.tensor, end: tl.tensor, BLOCK_SIZE: tl.constexpr) -> Any:
    return tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def slot_offsets(cache: tl.tuple, blocks: tl.tensor, keys: tl.tensor, BLOCK_SIZE: tl.constexpr) -> Any:
    """Return the cache offsets, in elements, of the positions `keys` [keys] with the block ids `blocks`."""
    return blocks.to(tl.int64) * cache.block_stride + (keys % BLOCK_SIZE) * cache.slot_stride


@triton.jit
def load_slots(
    cache: tl.tensor, slots: tl.tensor, exists: tl.tensor, BLOCK_D: tl.constexpr, DIM: tl.constexpr
) -> Any:
    """Load keys or values [keys, dims] at the offsets `slots`, with zeros for those that do not exist."""
    dims = tl.arange(0, BLOCK_D)
    exists = exists[:, None]
    if BLOCK_D != DIM:
        exists &= dims[None, :] < DIM
    return tl.load(cache + slots[:, None] + dims[None, :], mask=exists, other=0.0)


@triton.constexpr_function
def head_step(kind: tl.dtype, dim: int) -> int:
    """Return the number of elements from one head of a slot to the next."""
    return dim + 4 if kind == tl.int8 else dim


@triton.jit
def load_scales(cache: tl.tensor, slots: tl.tensor, exists: tl.tensor, DIM: tl.constexpr) -> Any:
    """Load the float32 scales [keys] of heads of an int8 cache, which follow the DIM values of a head."""
    floats = cache.to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(floats + (slots + DIM) // 4, mask=exists, other=0.0)


@triton.jit
def scores_of(
    q: tl.tensor, cache: tl.tensor, slots: tl.tensor, exists: tl.tensor,
    BLOCK_D: tl.constexpr, DIM: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the products [rows, keys] of queries q [rows, dims] and the keys at offsets `slots` [keys]."""
    k = load_slots(cache, slots, exists, BLOCK_D, DIM).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if cache.dtype.element_ty == tl.int8:
        scores *= load_scales(cache, slots, exists, DIM)[None, :]
    return scores


@triton.jit
def load_values(
    cache: tl.tensor, slots: tl.tensor, exists: tl.tensor,
    BLOCK_D: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr,
) -> Any:  # fmt: skip
    """Load values [keys, dims] in the dtype KIND; those of an int8 cache are scaled."""
    v = load_slots(cache, slots, exists, BLOCK_D, DIM)
    if cache.dtype.element_ty == tl.int8:
        v = v.to(tl.float32) * load_scales(cache, slots, exists, DIM)[:, None]
    return v.to(KIND)


@triton.jit
def online_softmax(
    scores: tl.tensor, most: tl.tensor, total: tl.tensor, at: tl.tensor, end: tl.tensor, low: tl.tensor,
    places: tl.tensor, last: tl.tensor, alibi_slopes: tl.tensor, scores_by: tl.tuple,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, BLOCK_N: tl.constexpr,
) -> Any:  # fmt: skip
    """Compute softmax weights [rows, keys] from `scores` of the keys from `at` on. Return the factor for the
    sums of earlier keys, the new maximum score and sum of weights, and the weights.

    `alibi_slopes` [rows], times log2(e), are subtracted per token between query and key; None: no ALiBi.
    """
    keys = at + tl.arange(0, BLOCK_N)
    factor = scores_by.scale
    if CAPPED:
        scores = scores_by.cap - 2 * scores_by.cap / (tl.exp2(scores * factor) + 1)
        factor = 1.0
    if alibi_slopes is not None:
        scores = scores * factor + alibi_slopes[:, None] * (keys[None, :] - places[:, None]).to(tl.float32)
        factor = 1.0
    if WINDOW:
        seen = (keys[None, :] <= last[:, None]) & (
            keys[None, :] >= first_key(places, WINDOW, CHUNKED)[:, None]
        )
        scores = tl.where(seen & (keys < end)[None, :], scores, float("-inf"))
    elif at + BLOCK_N > tl.minimum(low + 1, end):
        seen = (keys[None, :] <= last[:, None]) & (keys < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    shrink = tl.exp2(most - higher)
    return shrink, higher, total * shrink + tl.sum(weights, 1), weights


@triton.jit
def load_queries(
    q: tl.tensor, q_stride: tl.tensor, kv_head: tl.tensor, kv_heads: tl.tensor, start: tl.tensor,
    low: tl.tensor, high: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
) -> Any:  # fmt: skip
    """Load the queries of a tile, whose first token is `start` of the batch, at position `low` of its
    sequence. Return the queries [rows, dims], their positions and heads [rows], and for each element its
    offset in the output and whether it exists."""
    row, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query, heads = row // GROUP, kv_head * GROUP + row % GROUP
    token = (start + query).to(tl.int64)
    valid = ((low + query < high) & (query < BLOCK_M // GROUP))[:, None] & (dims[None, :] < DIM)
    rows = tl.load(
        q + (token[:, None] * q_stride + (heads * DIM)[:, None] + dims[None, :]), mask=valid, other=0.0
    )
    offsets = (token[:, None] * (kv_heads * GROUP) + heads[:, None]) * DIM + dims[None, :]
    return rows, tl.minimum(low + query, high - 1), heads, offsets, valid


@triton.jit
def initial(sinks: tl.tensor, heads: tl.tensor, counts: tl.tensor, BLOCK_D: tl.constexpr) -> Any:
    """Return the initial sum of values, maximum score and sum of weights of the rows. With `counts`, they
    include the heads' attention sinks (softmax logits without a value)."""
    acc = tl.zeros([heads.shape[0], BLOCK_D], tl.float32)
    most = tl.full([heads.shape[0]], NEVER, tl.float32)
    total = tl.zeros([heads.shape[0]], tl.float32)
    if sinks is not None:
        most = tl.where(counts, tl.load(sinks + heads).to(tl.float32) * _LOG2_E, most)
        total = tl.where(counts, 1.0, total)
    return acc, most, total


@triton.jit
def alibi_of(alibi_slopes: tl.tensor, heads: tl.tensor) -> Any:
    """Return the ALiBi slopes of the rows' heads times log2(e), or None without ALiBi."""
    slopes = alibi_slopes
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads) * _LOG2_E
    return slopes


@triton.jit
def finish(
    out: tl.tensor, acc: tl.tensor, total: tl.tensor, v_scale: tl.tensor, at: tl.tensor, valid: tl.tensor
) -> None:
    result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def tiles(
    out: tl.tensor, q: tl.tensor, q_stride: tl.tensor, cache: tl.tuple, seqs: tl.tuple, work: tl.tensor,
    sinks: tl.tensor, alibi_slopes: tl.tensor, reach: tl.tensor, scores_by: tl.tuple, partial: tl.tuple,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention of one tile of queries to all its keys; `out` is [tokens, heads, head_dim]. `work`
    [tiles, 2] has the sequence of each tile and its first query. Grid: (tiles, kv_heads).

    With `partial`, the keys of some tiles are cut into pieces of a program each: `work` [pieces, 6] then has
    also the first key, the end of the keys, the tile's first result and its number of pieces; 0: unused."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    if partial is not None:
        work += 4 * tile
        count = tl.load(work + 2 * tile + 5)
        if count == 0:
            return
    seq, skipped = tl.load(work + 2 * tile), tl.load(work + 2 * tile + 1)
    start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
    low = seq_len - (tl.load(seqs.query_starts + seq + 1) - start) + skipped
    high = tl.minimum(low + BLOCK_M // GROUP, seq_len)
    rows, places, heads, at, valid = load_queries(
        q, q_stride, kv_head, tl.num_programs(1), start + skipped, low, high, GROUP, DIM, BLOCK_D, BLOCK_M
    )
    table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
    last, end, first, is_first = places, high, 0, tile >= 0
    if partial is not None:
        first, stop = tl.load(work + 2 * tile + 2), tl.load(work + 2 * tile + 3)
        end, is_first = tl.minimum(end, stop), first == 0
    acc, most, total = initial(sinks, heads, is_first, BLOCK_D)
    if reach is not None:
        last = tl.load(reach + start + skipped + (places - low))
        end = tl.max(last, 0) + 1
    if WINDOW:
        first = first_key(low, WINDOW, CHUNKED)
    acc, most, total = accumulate(
        acc, most, total, rows, low, places, last,
        alibi_of(alibi_slopes, heads), cache, kv_head, table, first, end,
        scores_by,
        WINDOW, CHUNKED, CAPPED, DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    if partial is None:  # noqa: SIM114  known when the kernel is compiled
        finish(out, acc, total, scores_by.v_scale, at, valid)
    elif count == 1:
        finish(out, acc, total, scores_by.v_scale, at, valid)
    else:
        begin = tl.load(work + 2 * tile + 4)
        result = begin + first // (stop - first)  # all pieces of a cut tile have the same size
        sums, tops = _places_of_result(partial, result, kv_head, BLOCK_M, BLOCK_D, DIM)
        tl.store(sums, acc, mask=valid)
        tl.store(tops, most)
        tl.store(tops + BLOCK_M, total)
        arrivals = partial.arrivals + begin * tl.num_programs(1) + kv_head
        # All threads must have written before the arrival is counted.
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1:
            tl.store(arrivals, 0)
            acc, total = _merge_pieces(partial, begin, count, kv_head, valid, BLOCK_M, BLOCK_D, DIM)
            finish(out, acc, total, scores_by.v_scale, at, valid)


@triton.jit
def _places_of_result(
    partial: tl.tuple, result: tl.tensor, kv_head: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the addresses of the sums of values [rows, dims] and maximum scores [rows] of a piece."""
    row, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at = (result * tl.num_programs(1) + kv_head).to(tl.int64)
    sums = partial.sums + at * (BLOCK_M * DIM) + row[:, None] * DIM + dims[None, :]
    return sums, partial.tops + at * (2 * BLOCK_M) + row


@triton.jit
def _merge_pieces(
    partial: tl.tuple, begin: tl.tensor, count: tl.tensor, kv_head: tl.tensor, valid: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the sums of values [rows, dims] and of softmax weights [rows] of a tile's pieces."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    most, total = tl.full([BLOCK_M], NEVER, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for result in range(begin, begin + count):
        sums, tops = _places_of_result(partial, result, kv_head, BLOCK_M, BLOCK_D, DIM)
        top = tl.load(tops, cache_modifier=".cg")
        weight = tl.load(tops + BLOCK_M, cache_modifier=".cg")
        higher = tl.maximum(most, top)
        shrink, factor = tl.exp2(most - higher), tl.exp2(top - higher)
        values = tl.load(sums, mask=valid, other=0.0, cache_modifier=".cg")
        acc = acc * shrink[:, None] + values * factor[:, None]
        total = total * shrink + weight * factor
        most = higher
    return acc, total
