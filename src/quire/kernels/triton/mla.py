"""Latent attention on a GPU, over caches [num_blocks, block_size, RANK + ROPE]: a latent, then a turned key.

For decodes every head is a query against the same latents, which are key and value at once: `shares` loads
them once for all heads of a token, each program an equal share of all keys, and `merge` puts together what
several shares saw of a sequence. For prompts `gather` copies the latents of a sequence out of its blocks;
they are multiplied out to keys and values, which `tiles` attends to.
"""
# mypy: disable-error-code="untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.attention import NEVER, soften
from quire.kernels.triton.launch import follow
from quire.kernels.triton.split_kv import share


class Latents(NamedTuple):
    """One layer's cache; strides in elements."""

    data: Any
    block_stride: Any
    slot_stride: Any


class Queries(NamedTuple):
    """The two parts of queries, [tokens, heads, RANK] and [tokens, heads, ROPE]; strides in elements."""

    latent: Any
    latent_token: Any
    latent_head: Any
    rope: Any
    rope_token: Any
    rope_head: Any


class PartialMLA(NamedTuple):
    """What shares saw of sequences that are not theirs alone. A share has up to two: one that went on from
    another share, and one that goes on in the next."""

    sums: Any
    """[groups, shares, 2, rows, RANK] float32"""
    tops: Any
    """[groups, shares, 2, 2, rows] float32: greatest score, sum of weights"""
    spans: Any
    """[sequences, 2] int32: the first and the last share of each"""


@triton.jit
def enter(
    q: tl.tensor,
    q_stride: tl.tensor,
    kv: tl.tensor,
    kv_stride: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cache: tl.tuple,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (tokens, 2): the latent is normed, the key turned and both written; the queries turn in place.

    A cache of 8 bits holds numbers up to LIMIT, divided by `scale`."""
    token, pair = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P)
    turns = pair < ROPE // 2
    left = 2 * pair if NEIGHBOURS else pair
    right = left + (1 if NEIGHBOURS else ROPE // 2)
    follow(OVERLAP)
    row = table + tl.load(positions + token) * ROPE
    cos = tl.load(row + pair, mask=turns, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + ROPE // 2 + pair, mask=turns, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) == 1:
        head = tl.arange(0, BLOCK_H)[:, None]
        there = (head < HEADS) & turns[None, :]
        at = q + token * q_stride + head * (NOPE + ROPE) + NOPE
        a, b = _turned(at, left[None, :], right[None, :], there, cos, sin)
        tl.store(at + left[None, :], a, mask=there)
        tl.store(at + right[None, :], b, mask=there)
    slot = tl.load(slots + token)
    if (tl.program_id(1) == 0) & (slot >= 0):
        dims = tl.arange(0, BLOCK_R)
        there = dims < RANK
        new = kv + token * kv_stride
        to = cache.data + slot // BLOCK_SIZE * cache.block_stride + slot % BLOCK_SIZE * cache.slot_stride
        x = tl.load(new + dims, mask=there, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)).to(kv.dtype.element_ty)
        x = x.to(tl.float32) * tl.load(weight + dims, mask=there, other=0.0).to(tl.float32)
        x = _kept(x.to(kv.dtype.element_ty), scale, LIMIT)
        tl.store(to + dims, x.to(cache.data.dtype.element_ty), mask=there)
        a, b = _turned(new + RANK, left[None, :], right[None, :], turns[None, :], cos, sin)
        a, b = _kept(a, scale, LIMIT), _kept(b, scale, LIMIT)
        tl.store(to + RANK + left[None, :], a.to(to.dtype.element_ty), mask=turns[None, :])
        tl.store(to + RANK + right[None, :], b.to(to.dtype.element_ty), mask=turns[None, :])


@triton.jit
def _kept(x: tl.tensor, scale: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """As a cache of 8 bits has it."""
    return x if LIMIT == 0 else tl.clamp(x.to(tl.float32) / scale, -LIMIT, LIMIT)


@triton.jit
def _turned(
    of: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    there: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
) -> Any:
    a = tl.load(of + left, mask=there, other=0.0).to(tl.float32)
    b = tl.load(of + right, mask=there, other=0.0).to(tl.float32)
    return (a * cos - b * sin).to(of.dtype.element_ty), (b * cos + a * sin).to(of.dtype.element_ty)


@triton.jit(do_not_specialize=["num_seqs", "least"])
def shares(
    out: tl.tensor,
    q: tl.tuple,
    cache: tl.tuple,
    seqs: tl.tuple,
    num_seqs: tl.tensor,
    scores_by: tl.tuple,
    partial: tl.tuple,
    least: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (groups, shares) -> [tokens, heads, RANK]. The rows of a sequence are the heads of its queries, in
    groups of BLOCK_M; its keys lie behind those of the one before, in tiles of BLOCK_N, and a share has
    `least` of them or more."""
    at, end, size, index, begin = share(seqs, None, num_seqs, least, 0, BLOCK_N)
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
            rows = _rows(q, start, row, valid, HEADS, RANK, ROPE, BLOCK_R, BLOCK_P)
            sums, most, total = _fold(
                rows, low, tl.minimum(low + row // HEADS, tl.maximum(seq_len, 1) - 1), cache, table,
                (at - begin) * BLOCK_N, tl.minimum((until - begin) * BLOCK_N, seq_len), scores_by,
                RANK, ROPE, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            earliest, latest = begin // size, (close - 1) // size
            if at == begin:  # only one share begins it
                tl.store(partial.spans + 2 * index, earliest)
                tl.store(partial.spans + 2 * index + 1, latest)
            if earliest == latest:
                by = scores_by.v_scale / tl.where(total > 0, total, 1.0)
                _put(out, start.to(tl.int64) * HEADS + row, valid, sums, by, RANK)
            else:
                own = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
                piece = (2 * own + (tl.program_id(1) == earliest)).to(tl.int64) * BLOCK_M
                mine = tl.arange(0, BLOCK_M)
                _put(partial.sums, piece + mine, valid, sums, scores_by.v_scale + 0 * total, RANK)
                tl.store(partial.tops + 2 * piece + mine, most)
                tl.store(partial.tops + 2 * piece + BLOCK_M + mine, total)
        at, begin, index = until, close, index + 1


@triton.jit
def _rows(
    q: tl.tuple,
    start: tl.tensor,
    row: tl.tensor,
    valid: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> Any:
    """The queries of a tile: the latent's part in two halves, and the part that turned."""
    token, head = (start + row // HEADS).to(tl.int64), row % HEADS
    latent = q.latent + (token * q.latent_token + head * q.latent_head)[:, None]
    rope = q.rope + (token * q.rope_token + head * q.rope_head)[:, None]
    left, right = _halves(latent, valid[:, None], RANK, BLOCK_R)
    return left, right, _load(rope, tl.arange(0, BLOCK_P), valid[:, None], ROPE)


@triton.jit
def _halves(rows: tl.tensor, there: tl.tensor, RANK: tl.constexpr, BLOCK_R: tl.constexpr) -> Any:
    dims = tl.arange(0, BLOCK_R // 2)
    right = dims + BLOCK_R // 2
    rest = there & (right < RANK)[None, :]
    return _load(rows, dims, there, RANK), tl.load(rows + right[None, :], mask=rest, other=0.0)


@triton.jit
def _put(
    out: tl.tensor, rows: tl.tensor, valid: tl.tensor, sums: tl.tuple, by: tl.tensor, RANK: tl.constexpr
) -> None:
    """Both halves of some rows of `out`."""
    HALF: tl.constexpr = sums[0].shape[1]
    dims = tl.arange(0, HALF)
    for half in tl.static_range(2):
        to = out + rows[:, None] * RANK + dims[None, :] + half * HALF
        there = valid[:, None] & (dims + half * HALF < RANK)[None, :]
        tl.store(to, (sums[half] * by[:, None]).to(out.dtype.element_ty), mask=there)


@triton.jit
def _fold(
    rows: tl.tuple,
    low: tl.tensor,
    places: tl.tensor,
    cache: tl.tuple,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scores_by: tl.tuple,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Any:
    """Of the keys first..end: each row's sum of latents, in two halves, greatest score and sum of weights.

    In halves, since a product over the whole is one long chain of additions that nothing else fills.
    """
    left, right, rope = rows
    BLOCK_M: tl.constexpr = left.shape[0]
    key, ropes = tl.arange(0, BLOCK_N), tl.arange(0, rope.shape[1])
    left_sum = tl.zeros([BLOCK_M, left.shape[1]], tl.float32)
    right_sum = left_sum
    most = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Blocks are looked up one turn ahead: the keys' own loads then need not wait for them.
    blocks = tl.load(table + (first + key) // BLOCK_SIZE, mask=first + key < end, other=0)
    # From 0: with any other start the compiler sees no aligned rows, and loads number by number.
    for taken in range(0, end - first, BLOCK_N):
        at = first + taken
        slots = blocks.to(tl.int64) * cache.block_stride + (at + key) % BLOCK_SIZE * cache.slot_stride
        ahead = at + BLOCK_N + key
        blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        there = (at + key < end)[:, None]
        latents = cache.data + slots[:, None]
        k_left, k_right = _halves(latents, there, RANK, 2 * left.shape[1])
        turned = _load(latents + RANK, ropes, there, ROPE).to(rope.dtype)
        k_left, k_right = k_left.to(left.dtype), k_right.to(left.dtype)
        scores = tl.dot(rope, tl.trans(turned), input_precision="ieee")
        scores = tl.dot(left, tl.trans(k_left), scores, input_precision="ieee")
        scores += tl.dot(right, tl.trans(k_right), input_precision="ieee")
        shrink, most, total, weights = soften(
            scores, most, total, at, end, low, places, places, None, scores_by, 0, False, BLOCK_N
        )
        weights = weights.to(k_left.dtype)
        left_sum = tl.dot(weights, k_left, left_sum * shrink[:, None], input_precision="ieee")
        right_sum = tl.dot(weights, k_right, right_sum * shrink[:, None], input_precision="ieee")
    return (left_sum, right_sum), most, total


@triton.jit
def _load(rows: tl.tensor, dims: tl.tensor, there: tl.tensor, DIM: tl.constexpr) -> Any:
    """Zeros where nothing is there."""
    if dims.shape[0] != DIM:
        there &= (dims < DIM)[None, :]
    return tl.load(rows + dims[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize=["shares"])
def merge(
    out: tl.tensor,
    query_starts: tl.tensor,
    partial: tl.tuple,
    shares: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (sequences, rows of one, pieces of RANK): of sequences that lie in several shares, so many of
    which are loaded at once."""
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
            there = other <= latest
            piece = (2 * (row // BLOCK_M * shares + other) + (other == earliest)).to(tl.int64) * BLOCK_M
            tops = partial.tops + 2 * piece + row % BLOCK_M
            top = tl.load(tops, mask=there, other=NEVER)
            count = tl.load(tops + BLOCK_M, mask=there, other=0.0)
            sums = partial.sums + (piece + row % BLOCK_M)[:, None] * RANK + dims[None, :]
            sums = tl.load(sums, mask=there[:, None] & (dims < RANK)[None, :], other=0.0)
            higher = tl.maximum(most, tl.max(top, 0))
            shrink, weight = tl.exp2(most - higher), tl.exp2(top - higher)
            acc = acc * shrink + tl.sum(sums * weight[:, None], 0)
            total = total * shrink + tl.sum(count * weight, 0)
            most = higher
        to = out + (start.to(tl.int64) * HEADS + row) * RANK + dims
        tl.store(to, (acc / total).to(out.dtype.element_ty), mask=dims < RANK)


@triton.jit
def gather(
    out: tl.tensor,
    cache: tl.tuple,
    seqs: tl.tuple,
    work: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Grid (tiles). `work` [tiles, 3]: the sequence, the first of its keys, where that goes in `out`."""
    work += 3 * tl.program_id(0)
    seq, first, to = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    keys, dims = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W)
    there = keys < tl.load(seqs.seq_lens + seq)
    table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=there, other=0)
    slots = blocks.to(tl.int64) * cache.block_stride + keys % BLOCK_SIZE * cache.slot_stride
    rows = _load(cache.data + slots[:, None], dims, there[:, None], WIDTH)
    to = (to + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * WIDTH + dims[None, :]
    if rows.dtype.primitive_bitwidth == 8:
        rows = (rows.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + to, rows, mask=there[:, None] & (dims < WIDTH)[None, :])


@triton.jit
def tiles(
    out: tl.tensor,
    out_stride: tl.tensor,
    q: tl.tensor,
    q_stride: tl.tensor,
    kv: tl.tensor,
    kv_stride: tl.tensor,
    turned: tl.tensor,
    turned_stride: tl.tensor,
    seqs: tl.tuple,
    work: tl.tensor,
    scores_by: tl.tuple,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid (tiles, heads). `work` [tiles, 3]: the sequence, which of its queries comes first, and where its
    keys begin in `kv` [keys, heads, NOPE + V] and `turned` [keys, ROPE]."""
    work, head = work + 3 * tl.program_id(0), tl.program_id(1)
    seq, skipped, begin = tl.load(work), tl.load(work + 1), tl.load(work + 2).to(tl.int64)
    start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
    low = seq_len - (tl.load(seqs.query_starts + seq + 1) - start) + skipped
    end = tl.minimum(low + BLOCK_M, seq_len)
    row, key = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, ropes, outs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    token, valid = (start + skipped + row).to(tl.int64), (low + row < end)[:, None]
    rows = q + (token * q_stride + head * (NOPE + ROPE))[:, None]
    plain = _load(rows, dims, valid, NOPE)
    rope = _load(rows + NOPE, ropes, valid, ROPE)
    places = tl.minimum(low + row, end - 1)
    kv += begin * kv_stride + head * (NOPE + V)
    turned += begin * turned_stride
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    most = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in range(0, end, BLOCK_N):
        there = (at + key < end)[:, None]
        keys = (at + key).to(tl.int64)[:, None]
        k = _load(turned + keys * turned_stride, ropes, there, ROPE)
        scores = tl.dot(rope, tl.trans(k), input_precision="ieee")
        k = _load(kv + keys * kv_stride, dims, there, NOPE)
        scores = tl.dot(plain, tl.trans(k), scores, input_precision="ieee")
        shrink, most, total, weights = soften(
            scores, most, total, at, end, low, places, places, None, scores_by, 0, False, BLOCK_N
        )
        v = _load(kv + keys * kv_stride + NOPE, outs, there, V)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    to = out + (token * out_stride + head * V)[:, None] + outs[None, :]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=valid & (outs < V)[None, :])
