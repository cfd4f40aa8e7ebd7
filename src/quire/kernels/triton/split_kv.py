"""Which of all keys a program of a decode takes: an equal share, whosever they are."""
# mypy: disable-error-code="untyped-decorator"

from typing import Any

import triton
import triton.language as tl

_SOME = tl.constexpr(256)
"""Sequences whose keys are counted at once."""


@triton.jit
def tiles_of(
    seq_lens: tl.tensor, num_queries: tl.tensor, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Of the keys that a sequence's queries see; at least one."""
    if WINDOW:
        seq_lens = tl.minimum(seq_lens, num_queries + (WINDOW - 1))
    return tl.maximum(tl.cdiv(seq_lens, BLOCK_N), 1)


@triton.jit
def tiles_of_some(
    seqs: tl.tuple,
    work: tl.tensor,
    index: tl.tensor,
    num_seqs: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """How many tiles each of these sequences has."""
    there = index < num_seqs
    seq = index if work is None else tl.load(work + index, mask=there, other=0)
    num_queries = 0
    if WINDOW:
        num_queries = tl.load(seqs.query_starts + seq + 1, mask=there, other=0)
        num_queries -= tl.load(seqs.query_starts + seq, mask=there, other=0)
    count = tiles_of(tl.load(seqs.seq_lens + seq, mask=there, other=0), num_queries, WINDOW, BLOCK_N)
    return tl.where(there, count, 0)


@triton.jit
def share(
    seqs: tl.tuple,
    work: tl.tensor,
    num_seqs: tl.tensor,
    least: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Any:
    """A program's tiles at..end of all, how many a share has, which sequence it begins in, and where that
    begins."""
    some = tl.arange(0, _SOME)
    ends = tl.cumsum(tiles_of_some(seqs, work, some, num_seqs, WINDOW, BLOCK_N), 0)
    before = tl.max(ends, 0)
    total = before
    for first in range(_SOME, num_seqs, _SOME):
        total += tl.sum(tiles_of_some(seqs, work, first + some, num_seqs, WINDOW, BLOCK_N), 0)
    size = tl.maximum(tl.cdiv(total, tl.num_programs(1)), least)
    at = tl.program_id(1) * size
    passed = _passed(at, ends, some)
    for first in range(_SOME, num_seqs, _SOME):
        ends = before + tl.cumsum(tiles_of_some(seqs, work, first + some, num_seqs, WINDOW, BLOCK_N), 0)
        passed, before = tl.maximum(passed, _passed(at, ends, first + some)), tl.max(ends, 0)
    return at, tl.minimum(at + size, total), size, passed.to(tl.int32), (passed >> 32).to(tl.int32)


@triton.jit
def _passed(at: tl.tensor, ends: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Of the last sequence that ends before `at`: its end, above 32 bits with the index of the next."""
    return tl.max(tl.where(ends <= at, (ends.to(tl.int64) << 32) | (index + 1), 0), 0)
