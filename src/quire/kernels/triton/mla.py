"""MLA on a GPU, over caches [num_blocks, block_size, RANK + ROPE]: a latent, then a rotated key.

In decodes all heads attend to the same latents, which are keys and values at once. In `shares` (split-KV),
each program processes an equal share of the keys of all sequences, and loads a latent once for all heads of a
token. `merge` combines the partial results of a sequence. In prefill, `gather` copies the latents of a
sequence from its blocks. The latents are expanded to keys and values, to which `tiles` attends.
"""
# mypy: disable-error-code="untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.attention import NEVER, online_softmax
from quire.kernels.triton.launch import follow
from quire.kernels.triton.split_kv_shares import share


class Latents(NamedTuple):
    """Latent cache of one layer, [num_blocks, block_size, RANK + ROPE]; strides are in elements."""

    data: Any
    block_stride: Any
    slot_stride: Any


class Queries(NamedTuple):
    """The two parts of queries, [tokens, heads, RANK] and [tokens, heads, ROPE]; strides are in elements."""

    latent: Any
    latent_token: Any
    latent_head: Any
    rope: Any
    rope_token: Any
    rope_head: Any


class PartialMLA(NamedTuple):
    """Partial results of sequences whose keys lie in several shares, for `merge`. A share has up to two: of a
    sequence that begins in an earlier share, and of one that continues in the next share."""

    sums: Any
    """[groups, shares, 2, rows, RANK] float32"""
    tops: Any
    """[groups, shares, 2, 2, rows] float32: maximum score, sum of weights"""
    spans: Any
    """[sequences, 2] int32: first and last share of each sequence"""


@triton.jit
def enter(
    q: tl.tensor, q_stride: tl.tensor, kv: tl.tensor, kv_stride: tl.tensor, weight: tl.tensor, eps: tl.tensor,
    table: tl.tensor, positions: tl.tensor, slots: tl.tensor, cache: tl.tuple, scale: tl.tensor,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, NEIGHBOURS: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """For one token, normalize the latent, apply RoPE to the key and write both to the cache, or apply RoPE
    to the queries in place. Grid: (tokens, 2).

    Values of an 8-bit cache are divided by `scale` and at most LIMIT.
    """
    token, pair = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P)
    rotated = pair < ROPE // 2
    left = 2 * pair if NEIGHBOURS else pair
    right = left + (1 if NEIGHBOURS else ROPE // 2)
    follow(OVERLAP)
    row = table + tl.load(positions + token) * ROPE
    cos = tl.load(row + pair, mask=rotated, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + ROPE // 2 + pair, mask=rotated, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) == 1:
        head = tl.arange(0, BLOCK_H)[:, None]
        exists = (head < HEADS) & rotated[None, :]
        at = q + token * q_stride + head * (NOPE + ROPE) + NOPE
        a, b = _rotate(at, left[None, :], right[None, :], exists, cos, sin)
        tl.store(at + left[None, :], a, mask=exists)
        tl.store(at + right[None, :], b, mask=exists)
    slot = tl.load(slots + token)
    if (tl.program_id(1) == 0) & (slot >= 0):
        dims = tl.arange(0, BLOCK_R)
        exists = dims < RANK
        new = kv + token * kv_stride
        to = cache.data + slot // BLOCK_SIZE * cache.block_stride + slot % BLOCK_SIZE * cache.slot_stride
        x = tl.load(new + dims, mask=exists, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)).to(kv.dtype.element_ty)
        x = x.to(tl.float32) * tl.load(weight + dims, mask=exists, other=0.0).to(tl.float32)
        x = _to_cache(x.to(kv.dtype.element_ty), scale, LIMIT)
        tl.store(to + dims, x.to(cache.data.dtype.element_ty), mask=exists)
        a, b = _rotate(new + RANK, left[None, :], right[None, :], rotated[None, :], cos, sin)
        a, b = _to_cache(a, scale, LIMIT), _to_cache(b, scale, LIMIT)
        tl.store(to + RANK + left[None, :], a.to(to.dtype.element_ty), mask=rotated[None, :])
        tl.store(to + RANK + right[None, :], b.to(to.dtype.element_ty), mask=rotated[None, :])


@triton.jit
def _to_cache(x: tl.tensor, scale: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """Return x divided by `scale` and clamped to LIMIT, for an 8-bit cache; with LIMIT 0, return x."""
    return x if LIMIT == 0 else tl.clamp(x.to(tl.float32) / scale, -LIMIT, LIMIT)


@triton.jit
def _rotate(
    at: tl.tensor, left: tl.tensor, right: tl.tensor, exists: tl.tensor, cos: tl.tensor, sin: tl.tensor,
) -> Any:  # fmt: skip
    a = tl.load(at + left, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(at + right, mask=exists, other=0.0).to(tl.float32)
    return (a * cos - b * sin).to(at.dtype.element_ty), (b * cos + a * sin).to(at.dtype.element_ty)


@triton.jit(do_not_specialize=["num_seqs", "least"])
def shares(
    out: tl.tensor, q: tl.tuple, cache: tl.tuple, seqs: tl.tuple, num_seqs: tl.tensor, scores_by: tl.tuple,
    partial: tl.tuple, least: tl.tensor,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention to one share of the keys of all sequences; `out` is [tokens, heads, RANK]. The rows
    of a sequence are the heads of its queries, in groups of BLOCK_M. The tiles of BLOCK_N keys are numbered
    over all sequences; a share has at least `least` tiles. Grid: (groups, shares)."""
    at, end, size, index, begin = share(seqs, None, num_seqs, least, 0, False, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    follow(OVERLAP)
    while at < end:
        start, seq_len = tl.load(seqs.query_starts + index), tl.load(seqs.seq_lens + index)
        num_queries = tl.load(seqs.query_starts + index + 1) - start
        table = seqs.block_tables + tl.load(seqs.rows + index).to(tl.int64) * seqs.table_stride
        close = begin + tl.maximum(tl.cdiv(seq_len, BLOCK_N), 1)
        until = tl.minimum(close, end)
        if tl.program_id(0) * BLOCK_M < num_queries * HEADS:
            low = tl.maximum(seq_len - num_queries, 0)
            valid = row < num_queries * HEADS
            rows = _load_queries(q, start, row, valid, HEADS, RANK, ROPE, BLOCK_R, BLOCK_P)
            sums, most, total = _accumulate(
                rows, low, tl.minimum(low + row // HEADS, tl.maximum(seq_len, 1) - 1), cache, table,
                (at - begin) * BLOCK_N, tl.minimum((until - begin) * BLOCK_N, seq_len), scores_by,
                RANK, ROPE, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            earliest, latest = begin // size, (close - 1) // size
            if at == begin:  # the one share in which the sequence begins
                tl.store(partial.spans + 2 * index, earliest)
                tl.store(partial.spans + 2 * index + 1, latest)
            if earliest == latest:
                by = scores_by.v_scale / tl.where(total > 0, total, 1.0)
                _store_halves(out, start.to(tl.int64) * HEADS + row, valid, sums, by, RANK)
            else:
                program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
                piece = (2 * program + (tl.program_id(1) == earliest)).to(tl.int64) * BLOCK_M
                rows_at = tl.arange(0, BLOCK_M)
                _store_halves(partial.sums, piece + rows_at, valid, sums, scores_by.v_scale + 0 * total, RANK)
                tl.store(partial.tops + 2 * piece + rows_at, most)
                tl.store(partial.tops + 2 * piece + BLOCK_M + rows_at, total)
        at, begin, index = until, close, index + 1


@triton.jit
def fixed_rows(
    out: tl.tensor, q: tl.tuple, cache: tl.tuple, seqs: tl.tuple, scores_by: tl.tuple,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention of BLOCK_M rows of a sequence to all their keys, in the batch-invariant mode; rows
    are the heads of its queries. Output [tokens, heads, RANK]. Grid: (groups of rows, sequences)."""
    seq, row = tl.program_id(1), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
    num_queries = tl.load(seqs.query_starts + seq + 1) - start
    if tl.program_id(0) * BLOCK_M < num_queries * HEADS:
        table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
        low, valid = tl.maximum(seq_len - num_queries, 0), row < num_queries * HEADS
        rows = _load_queries(q, start, row, valid, HEADS, RANK, ROPE, BLOCK_R, BLOCK_P)
        places = tl.minimum(low + row // HEADS, tl.maximum(seq_len, 1) - 1)
        end = tl.minimum(tl.max(places, 0) + 1, seq_len)
        sums, _, total = _accumulate(
            rows, low, places, cache, table, 0, end, scores_by, RANK, ROPE, BLOCK_SIZE, BLOCK_N
        )
        by = scores_by.v_scale / tl.where(total > 0, total, 1.0)
        _store_halves(out, start.to(tl.int64) * HEADS + row, valid, sums, by, RANK)


@triton.jit
def _load_queries(
    q: tl.tuple, start: tl.tensor, row: tl.tensor, valid: tl.tensor,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
) -> Any:  # fmt: skip
    """Load the queries of a tile: the latent part in two halves, and the rotated part."""
    token, head = (start + row // HEADS).to(tl.int64), row % HEADS
    latent = q.latent + (token * q.latent_token + head * q.latent_head)[:, None]
    rope = q.rope + (token * q.rope_token + head * q.rope_head)[:, None]
    left, right = _load_halves(latent, valid[:, None], RANK, BLOCK_R)
    return left, right, _load(rope, tl.arange(0, BLOCK_P), valid[:, None], ROPE)


@triton.jit
def _load_halves(rows: tl.tensor, exists: tl.tensor, RANK: tl.constexpr, BLOCK_R: tl.constexpr) -> Any:
    dims = tl.arange(0, BLOCK_R // 2)
    right = dims + BLOCK_R // 2
    rest = exists & (right < RANK)[None, :]
    return _load(rows, dims, exists, RANK), tl.load(rows + right[None, :], mask=rest, other=0.0)


@triton.jit
def _store_halves(
    out: tl.tensor, rows: tl.tensor, valid: tl.tensor, sums: tl.tuple, by: tl.tensor, RANK: tl.constexpr
) -> None:
    """Multiply `sums`, each row's sum of latents in two halves, by the row's factor `by`, and store them to
    `rows` of `out`."""
    HALF: tl.constexpr = sums[0].shape[1]
    dims = tl.arange(0, HALF)
    for half in tl.static_range(2):
        to = out + rows[:, None] * RANK + dims[None, :] + half * HALF
        exists = valid[:, None] & (dims + half * HALF < RANK)[None, :]
        tl.store(to, (sums[half] * by[:, None]).to(out.dtype.element_ty), mask=exists)


@triton.jit
def _accumulate(
    rows: tl.tuple, low: tl.tensor, places: tl.tensor, cache: tl.tuple, table: tl.tensor, first: tl.tensor,
    end: tl.tensor, scores_by: tl.tuple,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> Any:  # fmt: skip
    """Return each row's weighted sum of latents (in two halves), maximum score and sum of weights for the
    keys first..end. Two halves give two independent chains of tensor core operations, which can overlap.
    """
    left, right, rope = rows
    BLOCK_M: tl.constexpr = left.shape[0]
    key, ropes = tl.arange(0, BLOCK_N), tl.arange(0, rope.shape[1])
    left_sum = tl.zeros([BLOCK_M, left.shape[1]], tl.float32)
    right_sum = left_sum
    most = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Block ids are loaded one iteration ahead, so that the loads of keys do not wait for them.
    blocks = tl.load(table + (first + key) // BLOCK_SIZE, mask=first + key < end, other=0)
    # The range starts at 0: with another start, the compiler does not find rows aligned and loads single
    # elements.
    for offset in range(0, end - first, BLOCK_N):
        at = first + offset
        slots = blocks.to(tl.int64) * cache.block_stride + (at + key) % BLOCK_SIZE * cache.slot_stride
        ahead = at + BLOCK_N + key
        blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        exists = (at + key < end)[:, None]
        latents = cache.data + slots[:, None]
        k_left, k_right = _load_halves(latents, exists, RANK, 2 * left.shape[1])
        k_rope = _load(latents + RANK, ropes, exists, ROPE).to(rope.dtype)
        k_left, k_right = k_left.to(left.dtype), k_right.to(left.dtype)
        scores = tl.dot(rope, tl.trans(k_rope), input_precision="ieee")
        scores = tl.dot(left, tl.trans(k_left), scores, input_precision="ieee")
        scores += tl.dot(right, tl.trans(k_right), input_precision="ieee")
        shrink, most, total, weights = online_softmax(
            scores, most, total, at, end, low, places, places, None, scores_by, 0, False, False, BLOCK_N
        )
        weights = weights.to(k_left.dtype)
        left_sum = tl.dot(weights, k_left, left_sum * shrink[:, None], input_precision="ieee")
        right_sum = tl.dot(weights, k_right, right_sum * shrink[:, None], input_precision="ieee")
    return (left_sum, right_sum), most, total


@triton.jit
def _load(rows: tl.tensor, dims: tl.tensor, exists: tl.tensor, DIM: tl.constexpr) -> Any:
    """Load elements `dims` of the vectors at `rows`, with zeros where a row or dimension does not exist."""
    if dims.shape[0] != DIM:
        exists &= (dims < DIM)[None, :]
    return tl.load(rows + dims[None, :], mask=exists, other=0.0)


@triton.jit(do_not_specialize=["shares"])
def merge(
    out: tl.tensor, query_starts: tl.tensor, partial: tl.tuple, shares: tl.tensor,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    SHARES: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the partial sums of sequences that lie in several shares, SHARES shares at a time. Grid:
    (sequences, rows of a sequence, RANK / BLOCK_D)."""
    seq, row, dims = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.load(query_starts + seq)
    num_rows = (tl.load(query_starts + seq + 1) - start) * HEADS
    follow(OVERLAP)
    earliest, latest = tl.load(partial.spans + 2 * seq), tl.load(partial.spans + 2 * seq + 1)
    if (earliest < latest) & (row < num_rows):
        acc = tl.zeros([BLOCK_D], tl.float32)
        most, total = tl.full([], NEVER, tl.float32), tl.zeros([], tl.float32)
        for passed in range(0, latest + 1 - earliest, SHARES):
            other = earliest + passed + tl.arange(0, SHARES)
            exists = other <= latest
            piece = (2 * (row // BLOCK_M * shares + other) + (other == earliest)).to(tl.int64) * BLOCK_M
            tops = partial.tops + 2 * piece + row % BLOCK_M
            top = tl.load(tops, mask=exists, other=NEVER)
            count = tl.load(tops + BLOCK_M, mask=exists, other=0.0)
            sums = partial.sums + (piece + row % BLOCK_M)[:, None] * RANK + dims[None, :]
            sums = tl.load(sums, mask=exists[:, None] & (dims < RANK)[None, :], other=0.0)
            higher = tl.maximum(most, tl.max(top, 0))
            shrink, weight = tl.exp2(most - higher), tl.exp2(top - higher)
            acc = acc * shrink + tl.sum(sums * weight[:, None], 0)
            total = total * shrink + tl.sum(count * weight, 0)
            most = higher
        to = out + (start.to(tl.int64) * HEADS + row) * RANK + dims
        tl.store(to, (acc / total).to(out.dtype.element_ty), mask=dims < RANK)


@triton.jit
def gather(
    out: tl.tensor, cache: tl.tuple, seqs: tl.tuple, work: tl.tensor, scale: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
) -> None:  # fmt: skip
    """Copy a tile of cached latents and rotated keys to `out` [keys, WIDTH]. `work` [tiles, 3] has for each
    tile its sequence, its first key and the row in `out`. Grid: (tiles,)."""
    work += 3 * tl.program_id(0)
    seq, first, to = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    keys, dims = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W)
    exists = keys < tl.load(seqs.seq_lens + seq)
    table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0)
    slots = blocks.to(tl.int64) * cache.block_stride + keys % BLOCK_SIZE * cache.slot_stride
    rows = _load(cache.data + slots[:, None], dims, exists[:, None], WIDTH)
    to = (to + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * WIDTH + dims[None, :]
    if rows.dtype.primitive_bitwidth == 8:
        rows = (rows.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + to, rows, mask=exists[:, None] & (dims < WIDTH)[None, :])


@triton.jit
def tiles(
    out: tl.tensor, out_stride: tl.tensor, q: tl.tensor, q_stride: tl.tensor, kv: tl.tensor,
    kv_stride: tl.tensor, turned: tl.tensor, turned_stride: tl.tensor, seqs: tl.tuple, work: tl.tensor,
    scores_by: tl.tuple,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention of one tile of queries and one head. `work` [tiles, 3] has for each tile its
    sequence, its first query, and where the sequence begins in the keys and values `kv` [keys, heads, NOPE +
    V] and the rotated keys `turned` [keys, ROPE]. Grid: (tiles, heads)."""
    work, head = work + 3 * tl.program_id(0), tl.program_id(1)
    seq, skipped, begin = tl.load(work), tl.load(work + 1), tl.load(work + 2).to(tl.int64)
    start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
    low = seq_len - (tl.load(seqs.query_starts + seq + 1) - start) + skipped
    end = tl.minimum(low + BLOCK_M, seq_len)
    row, key = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, ropes, outs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    token, valid = (start + skipped + row).to(tl.int64), (low + row < end)[:, None]
    rows = q + (token * q_stride + head * (NOPE + ROPE))[:, None]
    nope = _load(rows, dims, valid, NOPE)
    rope = _load(rows + NOPE, ropes, valid, ROPE)
    places = tl.minimum(low + row, end - 1)
    kv += begin * kv_stride + head * (NOPE + V)
    turned += begin * turned_stride
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    most = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in range(0, end, BLOCK_N):
        exists = (at + key < end)[:, None]
        keys = (at + key).to(tl.int64)[:, None]
        k = _load(turned + keys * turned_stride, ropes, exists, ROPE)
        scores = tl.dot(rope, tl.trans(k), input_precision="ieee")
        k = _load(kv + keys * kv_stride, dims, exists, NOPE)
        scores = tl.dot(nope, tl.trans(k), scores, input_precision="ieee")
        shrink, most, total, weights = online_softmax(
            scores, most, total, at, end, low, places, places, None, scores_by, 0, False, False, BLOCK_N
        )
        v = _load(kv + keys * kv_stride + NOPE, outs, exists, V)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    to = out + (token * out_stride + head * V)[:, None] + outs[None, :]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=valid & (outs < V)[None, :])
