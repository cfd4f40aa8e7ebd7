"""Speculative decoding state on a GPU, from which steps run before the host has read the accepted tokens.

`derive` builds the inputs of a decode from the state of its row. `verify` accepts sampled tokens up to the
first draft that differs. `look_up` proposes the tokens that followed an earlier occurrence of the last tokens
(n-gram). `place` computes the positions and slots of a draft model.
"""
# mypy: disable-error-code="untyped-decorator"

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch
from quire.kernels.triton.sampling import LATER

CONTEXT = 32
"""Maximum tokens that `look_up` compares for each earlier position."""
DRAFTED = 16
"""Lowest bit of the number of draft tokens in a result of `verify`; the bits below are the number of new
tokens."""
_ALIGN = 16
"""Alignment of the arrays of `place` in elements: kernels are compiled for aligned pointers."""
_TILE = 1024
"""Positions per step of a program."""
_SPLITS = 8
"""Maximum programs per sequence."""


class SpecTokens(NamedTuple):
    """Tokens and drafts of running sequences, each of which has a row; the last row is padding."""

    history: Any
    """[rows, width] int32: all tokens of a sequence; ids below 0 are never drafted"""
    lengths: Any
    """[rows] int32: number of tokens"""
    drafts: Any
    """[rows, most] int64: draft tokens"""
    num_drafts: Any
    """[rows] int32: number of draft tokens"""
    width: Any
    """Number of columns of `history`."""
    most: Any
    """Maximum number of draft tokens of a row."""


class SpecStep(NamedTuple):
    """The B sequences of a step."""

    query_starts: Any
    """[B + 1] int32, as in `Batch`"""
    rows: Any
    """[B] int32: row of each sequence in `SpecTokens`"""
    planned: Any
    """[B] int32: number of planned draft tokens; below 0 if the host wrote the inputs"""
    sample_starts: Any
    """[B] int32: index of the first sample of each sequence in the step; below 0 if it has none"""


@triton.jit
def _derive(
    state: tl.tuple, step: tl.tuple, token_ids: tl.tensor, positions: tl.tensor, seq_lens: tl.tensor,
    slots: tl.tensor, group_slots: tl.tensor, tables: tl.tensor, group_stride: tl.tensor,
    table_stride: tl.tensor, max_len: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the inputs of a decode for one sequence; see `derive`. `group_slots` and `group_stride` are the
    distances between the KV cache groups in `slots` and `tables`. Grid: (sequences,)."""
    seq = tl.program_id(0)
    planned = tl.load(step.planned + seq)
    if planned >= 0:
        row = tl.load(step.rows + seq).to(tl.int64)
        start = tl.load(step.query_starts + seq)
        count = tl.load(step.query_starts + seq + 1) - start
        length = tl.load(state.lengths + row)
        num_drafts = tl.minimum(planned, tl.load(state.num_drafts + row))
        at = tl.arange(0, BLOCK)
        valid, is_used, place = at < count, at <= num_drafts, length - 1 + at
        last = tl.load(state.history + row * state.width + length - 1)
        drafts = tl.load(state.drafts + row * state.most + at - 1, mask=(at > 0) & is_used, other=0)
        tl.store(token_ids + start + at, tl.where(at == 0, last.to(tl.int64), drafts), mask=valid)
        tl.store(positions + start + at, tl.minimum(place, max_len - 1).to(tl.int64), mask=valid)
        for group in tl.static_range(GROUPS):
            table = tables + group * group_stride + row * table_stride
            block = tl.load(table + place // BLOCK_SIZE, mask=valid & is_used, other=0).to(tl.int64)
            slot = tl.where(is_used, block * BLOCK_SIZE + place % BLOCK_SIZE, -1)
            tl.store(slots + group * group_slots + start + at, slot, mask=valid)
        tl.store(seq_lens + seq, length - 1 + count)


def derive(
    state: SpecTokens,
    step: SpecStep,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slots: Sequence[Tensor],
    tables: Tensor,
    block_size: int,
    max_len: int,
) -> None:
    """Write the inputs of the step's decodes: the last token of each row and its draft tokens, at most as
    many as planned. The remaining positions of a sequence are padding: they attend to earlier tokens and are
    not written to the KV cache.

    `slots` has a tensor for each KV cache group, at equal distances in memory; `tables` [groups, rows,
    blocks] are the block tables.
    """
    gap = (slots[1].data_ptr() - slots[0].data_ptr()) // 8 if len(slots) > 1 else 0
    launch(_derive, len(step.rows))(
        state, step, token_ids, positions, seq_lens, slots[0], gap, tables, *tables.stride()[:2], max_len,
        GROUPS=len(slots), BLOCK_SIZE=block_size, BLOCK=triton.next_power_of_2(state.most + 1), num_warps=1,
    )  # fmt: skip


@triton.jit
def _verify(
    state: tl.tuple, step: tl.tuple, drawn: tl.tensor, out: tl.tensor, seeds: tl.tensor, rates: tl.tensor,
    later: tl.tensor,
    BLOCK: tl.constexpr, DRAFTED: tl.constexpr, LATER: tl.constexpr,
) -> None:  # fmt: skip
    """Accept the draft tokens of one sequence that match its sampled tokens; see `verify`. Grid:
    (sequences,)."""
    seq = tl.program_id(0)
    if later is not None:  # noqa: SIM102
        if tl.load(later) == LATER:
            return
    first = tl.load(step.sample_starts + seq)
    count, drafted = 0, 0
    if first >= 0:
        row = tl.load(step.rows + seq).to(tl.int64)
        length, planned = tl.load(state.lengths + row), tl.maximum(tl.load(step.planned + seq), 0)
        num_drafts = tl.minimum(planned, tl.load(state.num_drafts + row))
        at = tl.arange(0, BLOCK)
        tokens = tl.load(drawn + first + at, mask=at <= planned, other=-1)
        drafts = tl.load(state.drafts + row * state.most + at, mask=at < num_drafts, other=-2)
        differs = tokens != drafts
        if rates is not None:
            rate = tl.load(rates + at, mask=at < num_drafts, other=0.0)
            differs = tl.rand(tl.load(seeds + first), length) >= rate
            tokens = tl.where(differs, tokens, drafts)
        count = tl.min(tl.where(differs, at, BLOCK), 0) + 1
        tl.store(state.history + row * state.width + length + at, tokens.to(tl.int32), mask=at < count)
        tl.store(state.lengths + row, length + count)
        tl.store(out + tl.num_programs(0) + first + at, tokens.to(tl.int32), mask=at <= planned)
        drafted = num_drafts
    tl.store(out + seq, count | (drafted << DRAFTED))


def verify(
    state: SpecTokens,
    step: SpecStep,
    drawn: Tensor,
    seeds: Tensor | None = None,
    rates: Tensor | None = None,
    later: Tensor | None = None,
) -> Tensor:
    """Accept draft tokens and add the new tokens to `state`. Return [B + N] int32: for each sequence the
    number of new tokens (0 without samples), from bit DRAFTED on its number of drafts; then all N tokens.

    `drawn` [N] int64 are the sampled tokens. With `rates` [most] float32 (synthetic acceptance), draft i is
    accepted, whatever was sampled, if a random number is below rates[i], which decrease; all drafts of a step
    share this number, which depends on the sequence's length and seed (in `seeds` [N]). If the value of
    `later` is LATER, nothing is done.
    """
    out = torch.empty(len(step.rows) + len(drawn), dtype=torch.int32, device=drawn.device)
    block = triton.next_power_of_2(state.most + 1)
    launch(_verify, len(step.rows))(
        state, step, drawn, out, seeds, rates, later,
        BLOCK=block, DRAFTED=DRAFTED, LATER=LATER, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _look_up(
    state: tl.tuple, step: tl.tuple, best: tl.tensor, arrivals: tl.tensor, least: tl.tensor,
    CONTEXT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Propose draft tokens for one sequence from its earlier tokens; see `look_up`. `best` and `arrivals` [B]
    are zeros before and after. Grid: (sequences, splits)."""
    seq, splits = tl.program_id(0), tl.num_programs(1)
    if tl.load(step.sample_starts + seq) >= 0:
        row = tl.load(step.rows + seq).to(tl.int64)
        length = tl.load(state.lengths + row)
        history = state.history + row * state.width
        best_key = tl.zeros([TILE], tl.int64)
        for first in range(tl.program_id(1) * TILE, length, splits * TILE):
            place = first + tl.arange(0, TILE)
            matches, num_matches, back, any_match = place < length, tl.zeros([TILE], tl.int32), 1, 1
            while (back <= CONTEXT) & (any_match > 0):
                end = tl.load(history + tl.maximum(length - back, 0))
                valid = (place >= back) & (place < length)
                token = tl.load(history + place - back, mask=valid, other=-1)
                matches = matches & (token == end) & (token >= 0)
                num_matches += matches.to(tl.int32)
                any_match, back = tl.sum(matches.to(tl.int32), 0), back + 1
            key = (num_matches.to(tl.int64) << 32) | place
            best_key = tl.maximum(best_key, tl.where(num_matches >= least, key, 0))
        tl.atomic_max(best + seq, tl.max(best_key, 0))
        if tl.atomic_add(arrivals + seq, 1) == splits - 1:
            chosen = tl.atomic_max(best + seq, 0)
            place, at = (chosen & 0xFFFFFFFF).to(tl.int32), tl.arange(0, BLOCK)
            is_draft = at < tl.where(chosen > 0, state.most, 0)
            # Beyond the last token, the match repeats.
            tokens = tl.load(history + place + at % tl.maximum(length - place, 1), mask=is_draft, other=-1)
            count = tl.min(tl.where(tokens < 0, at, BLOCK), 0)
            tl.store(state.drafts + row * state.most + at, tokens.to(tl.int64), mask=is_draft)
            tl.store(state.num_drafts + row, tl.minimum(count, state.most))
            tl.store(best + seq, 0)
            tl.store(arrivals + seq, 0)


def look_up(state: SpecTokens, step: SpecStep, scratch: Tensor, least: int) -> None:
    """Write draft tokens to `state` for the sequences that have sampled in this step: the tokens that
    followed an earlier occurrence of the last `least` tokens. Of all occurrences, the one with the longest
    match (up to CONTEXT tokens) is used, the latest among equals.

    `scratch` [2, B or more] int64 is zeros before and after.
    """
    splits = max(1, min(_SPLITS, state.width // _TILE))
    launch(_look_up, len(step.rows), splits)(
        state, step, scratch[0], scratch[1], least, CONTEXT=CONTEXT, TILE=_TILE,
        BLOCK=triton.next_power_of_2(state.most + 1), num_warps=4,
    )  # fmt: skip


@triton.jit
def _place(
    rows: tl.tensor, last: tl.tensor, num_slots: tl.tensor, tables: tl.tensor, group_stride: tl.tensor,
    table_stride: tl.tensor, positions: tl.tensor, stride: tl.tensor, seq_lens: tl.tensor, ahead: tl.tensor,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the positions and slots of one sequence's tokens for a draft model; see `place`. The slots of
    KV cache group g are stored (1 + g) * `stride` elements after the positions. Grid: (sequences,)."""
    seq = tl.program_id(0)
    row, limit = tl.load(rows + seq).to(tl.int64), tl.load(num_slots + seq)
    end = tl.load(last + seq) + ahead
    last_position = tl.maximum(tl.minimum(end, limit - 1), WIDTH - 1)
    tl.store(seq_lens + seq, (last_position + 1).to(tl.int32))
    for at in tl.static_range(WIDTH):
        position, position_at = last_position - (WIDTH - 1 - at), positions + seq * WIDTH + at
        tl.store(position_at, position)
        for group in tl.static_range(GROUPS):
            block = tl.load(tables + group * group_stride + row * table_stride + position // BLOCK_SIZE)
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(position_at + (1 + group) * stride, tl.where(end < limit, slot, -1))


def place(
    rows: Tensor, last: Tensor, num_slots: Tensor, tables: Tensor, ahead: int, width: int, block_size: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the positions [B * width], sequence lengths [B] and, by KV cache group, slots [B * width] of
    `width` tokens per sequence that end `ahead` positions after its `last` one, as `place` of
    worker/spec/drafter.py does in torch. `rows` [B] int32, `last` and `num_slots` [B] int64, `tables`
    [groups, rows, blocks]."""
    count, groups, size = len(rows), len(tables), len(rows) * width
    stride = -(-size // _ALIGN) * _ALIGN
    buffer = torch.empty((1 + groups, stride), dtype=torch.int64, device=rows.device)
    seq_lens = torch.empty(count, dtype=torch.int32, device=rows.device)
    launch(_place, count)(
        rows, last, num_slots, tables, *tables.stride()[:2], buffer, stride, seq_lens, ahead,
        GROUPS=groups, WIDTH=width, BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip
    return buffer[0, :size], seq_lens, list(buffer[1:, :size])
