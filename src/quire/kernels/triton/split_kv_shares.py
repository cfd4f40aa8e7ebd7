"""The key tiles that each program of split-KV decode processes, an equal share across all sequences."""
# mypy: disable-error-code="untyped-decorator"

from typing import Any

import triton
import triton.language as tl

_SEQS_AT_ONCE = tl.constexpr(256)
"""Number of sequences whose tiles a program counts at once."""


@triton.jit
def first_key(places: tl.tensor, WINDOW: tl.constexpr, CHUNKED: tl.constexpr) -> tl.tensor:
    """Return the first key that each query at positions `places` attends to."""
    if CHUNKED:
        first = places // WINDOW * WINDOW
    elif WINDOW:
        first = tl.maximum(places - WINDOW + 1, 0)
    else:
        first = places * 0
    return first


@triton.jit
def tiles_of(
    seq_lens: tl.tensor, num_queries: tl.tensor,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the number of key tiles that the queries of each sequence attend to, at least one."""
    if WINDOW:
        seq_lens -= first_key(tl.maximum(seq_lens - num_queries, 0), WINDOW, CHUNKED)
    return tl.maximum(tl.cdiv(seq_lens, BLOCK_N), 1)


@triton.jit
def tiles_of_some(
    seqs: tl.tuple, work: tl.tensor, index: tl.tensor, num_seqs: tl.tensor,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the number of key tiles of each sequence in `index`, 0 beyond the last sequence."""
    valid = index < num_seqs
    seq = index if work is None else tl.load(work + index, mask=valid, other=0)
    num_queries = 0
    if WINDOW:
        num_queries = tl.load(seqs.query_starts + seq + 1, mask=valid, other=0)
        num_queries -= tl.load(seqs.query_starts + seq, mask=valid, other=0)
    count = tiles_of(tl.load(seqs.seq_lens + seq, mask=valid, other=0), num_queries, WINDOW, CHUNKED, BLOCK_N)
    return tl.where(valid, count, 0)


@triton.jit
def share(
    seqs: tl.tuple, work: tl.tensor, num_seqs: tl.tensor, least: tl.tensor,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_N: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the range at..end of key tiles that this program processes, numbered over all sequences, the
    tiles per share (one program's tiles), the sequence in which the share begins, and the first tile of that
    sequence."""
    offsets = tl.arange(0, _SEQS_AT_ONCE)
    ends = tl.cumsum(tiles_of_some(seqs, work, offsets, num_seqs, WINDOW, CHUNKED, BLOCK_N), 0)
    before = tl.max(ends, 0)
    total = before
    for first in range(_SEQS_AT_ONCE, num_seqs, _SEQS_AT_ONCE):
        total += tl.sum(tiles_of_some(seqs, work, first + offsets, num_seqs, WINDOW, CHUNKED, BLOCK_N), 0)
    size = tl.maximum(tl.cdiv(total, tl.num_programs(1)), least)
    at = tl.program_id(1) * size
    passed = last_passed(at, ends, offsets)
    for first in range(_SEQS_AT_ONCE, num_seqs, _SEQS_AT_ONCE):
        ends = before + tl.cumsum(
            tiles_of_some(seqs, work, first + offsets, num_seqs, WINDOW, CHUNKED, BLOCK_N), 0
        )
        passed, before = tl.maximum(passed, last_passed(at, ends, first + offsets)), tl.max(ends, 0)
    return at, tl.minimum(at + size, total), size, passed.to(tl.int32), (passed >> 32).to(tl.int32)


@triton.jit
def last_passed(at: tl.tensor, ends: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return the end of the last sequence that ends at or before tile `at`, shifted left by 32 bits, plus the
    index of the next sequence. `ends` are the ends of the sequences `index`."""
    return tl.max(tl.where(ends <= at, (ends.to(tl.int64) << 32) | (index + 1), 0), 0)
