"""Split-KV decode: paged attention of sequences with few queries on a GPU.

Each program processes an equal share of the keys of all sequences. The last program of a sequence to finish
merges the sums of its shares."""
# mypy: disable-error-code="untyped-decorator"

from typing import Any

import triton
import triton.language as tl

from quire.kernels.triton.attention import NEVER, accumulate, alibi_of, finish, initial, load_queries
from quire.kernels.triton.launch import follow
from quire.kernels.triton.split_kv_shares import first_key, share, tiles_of


@triton.jit(do_not_specialize=["num_seqs", "least"], do_not_specialize_on_alignment=["work"])
def attend_split_kv(
    out: tl.tensor, q: tl.tensor, q_stride: tl.tensor, cache: tl.tuple, seqs: tl.tuple, work: tl.tensor,
    num_seqs: tl.tensor, sinks: tl.tensor, alibi_slopes: tl.tensor, scores_by: tl.tuple, partial: tl.tuple,
    least: tl.tensor,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention to one share of the keys of sequences with few queries. Grid: (kv_heads, shares).

    `work` [num_seqs] lists the sequences; None selects the first `num_seqs` of the batch. The keys of a
    sequence are whole tiles of BLOCK_N, numbered over all sequences; a share has at least `least` tiles.
    Before `follow`, a kernel may only read data that was written before the model's first kernel.
    """
    kv_head = tl.program_id(0)
    at, end, size, index, begin = share(seqs, work, num_seqs, least, WINDOW, CHUNKED, BLOCK_N)
    follow(OVERLAP)
    while at < end:
        seq = index if work is None else tl.load(work + index)
        start, seq_len = tl.load(seqs.query_starts + seq), tl.load(seqs.seq_lens + seq)
        num_queries = tl.load(seqs.query_starts + seq + 1) - start
        table = seqs.block_tables + tl.load(seqs.rows + seq).to(tl.int64) * seqs.table_stride
        close = begin + tiles_of(seq_len, num_queries, WINDOW, CHUNKED, BLOCK_N)
        until = tl.minimum(close, end)
        # The sequence spans the shares earliest..latest. Without keys, zeros are its output.
        earliest, latest = begin // size, (close - 1) // size
        low = tl.maximum(seq_len - num_queries, 0)
        first = first_key(low, WINDOW, CHUNKED) if WINDOW else 0
        rows, places, heads, place, valid = load_queries(
            q, q_stride, kv_head, tl.num_programs(0), start, low, tl.maximum(seq_len, 1), GROUP, DIM, BLOCK_D,
            BLOCK_M,
        )  # fmt: skip
        acc, most, total = initial(sinks, heads, at - begin == 0, BLOCK_D)
        acc, most, total = accumulate(
            acc, most, total, rows, low, places, places, alibi_of(alibi_slopes, heads), cache, kv_head, table,
            first + (at - begin) * BLOCK_N, tl.minimum(first + (until - begin) * BLOCK_N, seq_len), scores_by,
            WINDOW, CHUNKED, CAPPED, DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        if earliest == latest:
            finish(out, acc, total, scores_by.v_scale, place, valid)
        elif _store_partial(partial, acc, most, total, valid, kv_head, earliest, DIM) == latest - earliest:
            tl.store(partial.arrivals + kv_head * tl.num_programs(1) + earliest, 0)
            for query in range(num_queries):
                to = out + ((start + query).to(tl.int64) * tl.num_programs(0) + kv_head) * (GROUP * DIM)
                v_scale = scores_by.v_scale
                _merge(to, partial, kv_head, earliest, latest, query, v_scale, GROUP, DIM, BLOCK_M, BLOCK_D)
        at, begin, index = until, close, index + 1


@triton.jit
def _store_partial(
    partial: tl.tuple, acc: tl.tensor, most: tl.tensor, total: tl.tensor, valid: tl.tensor,
    kv_head: tl.tensor, earliest: tl.tensor,
    DIM: tl.constexpr,
) -> Any:  # fmt: skip
    """Store this share's partial result of a sequence that begins in share `earliest`. Return how many shares
    have stored theirs before."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    row, dims = tl.arange(0, BLOCK_M), tl.arange(0, acc.shape[1])
    group, share_index = kv_head * tl.num_programs(1), tl.program_id(1)
    at = (2 * (group + share_index) + (share_index == earliest)).to(tl.int64)
    tl.store(partial.sums + at * (BLOCK_M * DIM) + row[:, None] * DIM + dims[None, :], acc, mask=valid)
    tl.store(partial.tops + at * (2 * BLOCK_M) + row, most)
    tl.store(partial.tops + at * (2 * BLOCK_M) + BLOCK_M + row, total)
    # All threads must have written before the arrival is counted.
    tl.debug_barrier()
    return tl.atomic_add(partial.arrivals + group + earliest, 1, sem="acq_rel")


@triton.jit
def _merge(
    out: tl.tensor, partial: tl.tuple, kv_head: tl.tensor, earliest: tl.tensor, latest: tl.tensor,
    query: tl.tensor, v_scale: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the partial results of shares earliest..latest for the heads of a query; store the output."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    # Several shares are loaded at a time, so that their loads overlap.
    AT_ONCE: tl.constexpr = max(1, 8192 // (HEADS * BLOCK_D))
    head, dims = tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    row = query * GROUP + tl.minimum(head, GROUP - 1)
    valid = (head < GROUP)[:, None] & (dims < DIM)[None, :]
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
    most = tl.full([HEADS], NEVER, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for first in range(earliest, latest + 1, AT_ONCE):
        others = first + tl.arange(0, AT_ONCE)
        at = (2 * (kv_head * tl.num_programs(1) + others) + (others == earliest)).to(tl.int64)
        exists = (others <= latest)[:, None]
        tops = partial.tops + (at * (2 * BLOCK_M))[:, None] + row[None, :]
        top = tl.load(tops, mask=exists, other=NEVER, cache_modifier=".cg")
        count = tl.load(tops + BLOCK_M, mask=exists, other=0.0, cache_modifier=".cg")
        sums = (
            partial.sums + (at * (BLOCK_M * DIM))[:, None, None] + (row[:, None] * DIM + dims[None, :])[None]
        )
        sums = tl.load(sums, mask=exists[:, :, None] & valid[None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(most, tl.max(top, 0))
        shrink, weight = tl.exp2(most - higher), tl.exp2(top - higher[None, :])
        acc = acc * shrink[:, None] + tl.sum(sums * weight[:, :, None], 0)
        total = total * shrink + tl.sum(count * weight, 0)
        most = higher
    finish(out, acc, total, v_scale, head[:, None] * DIM + dims[None, :], valid)
