"""Drafts on a GPU: steps follow each other there before the host knows how many tokens they gave.

`derive` makes the inputs of a decode out of what its row has, `verify` keeps what a row drew up to the first
draft that is another, `look_up` proposes what followed the last tokens when they stood there before, `place`
says where a model that drafts has what it proposes.
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
"""Most tokens by which places are compared."""
DRAFTED = 16
"""The bit of what `verify` says of a sequence from which on the number of its drafts stands."""
_ALIGN = 16
"""Places, whose arrays lie so far apart: kernels are compiled for aligned pointers."""
_TILE = 1024
"""Places that are looked at together."""
_SPLITS = 8
"""Programs for each sequence, at most."""


class SpecTokens(NamedTuple):
    """What rows have, by row; the last one is padding."""

    history: Any
    """[rows, width] int32: their tokens; below 0 is none that could be drafted"""
    lengths: Any
    """[rows] int32: how many"""
    drafts: Any
    """[rows, most] int64: what may follow"""
    num_drafts: Any
    """[rows] int32: how many of these there are"""
    width: Any
    most: Any


class SpecStep(NamedTuple):
    """The B sequences of a step."""

    query_starts: Any
    """[B + 1] int32, `Batch`'s"""
    rows: Any
    """[B] int32"""
    planned: Any
    """[B] int32: how many of its tokens are to be drafts; below 0: its inputs are there"""
    draw_starts: Any
    """[B] int32: the first of its draws; below 0: it has none"""


@triton.jit
def _derive(
    known: tl.tuple,
    step: tl.tuple,
    token_ids: tl.tensor,
    positions: tl.tensor,
    seq_lens: tl.tensor,
    slots: tl.tensor,
    group_slots: tl.tensor,
    tables: tl.tensor,
    group_stride: tl.tensor,
    table_stride: tl.tensor,
    max_len: tl.tensor,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (sequences). Groups of layers lie `group_slots` slots and `group_stride` blocks apart."""
    seq = tl.program_id(0)
    planned = tl.load(step.planned + seq)
    if planned >= 0:
        row = tl.load(step.rows + seq).to(tl.int64)
        start = tl.load(step.query_starts + seq)
        count = tl.load(step.query_starts + seq + 1) - start
        length = tl.load(known.lengths + row)
        num_drafts = tl.minimum(planned, tl.load(known.num_drafts + row))
        at = tl.arange(0, BLOCK)
        there, counts, place = at < count, at <= num_drafts, length - 1 + at
        last = tl.load(known.history + row * known.width + length - 1)
        drafts = tl.load(known.drafts + row * known.most + at - 1, mask=(at > 0) & counts, other=0)
        tl.store(token_ids + start + at, tl.where(at == 0, last.to(tl.int64), drafts), mask=there)
        tl.store(positions + start + at, tl.minimum(place, max_len - 1).to(tl.int64), mask=there)
        for group in tl.static_range(GROUPS):
            table = tables + group * group_stride + row * table_stride
            block = tl.load(table + place // BLOCK_SIZE, mask=there & counts, other=0).to(tl.int64)
            slot = tl.where(counts, block * BLOCK_SIZE + place % BLOCK_SIZE, -1)
            tl.store(slots + group * group_slots + start + at, slot, mask=there)
        tl.store(seq_lens + seq, length - 1 + count)


def derive(
    known: SpecTokens,
    step: SpecStep,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slots: Sequence[Tensor],
    tables: Tensor,
    block_size: int,
    max_len: int,
) -> None:
    """Write the inputs of the decodes: the last token of each row and its drafts, as many as there are of
    those that were planned. What is left of its places reads what comes before and is written nowhere.

    `slots` are those of each group of layers, equally far apart, `tables` [groups, rows, blocks].
    """
    apart = (slots[1].data_ptr() - slots[0].data_ptr()) // 8 if len(slots) > 1 else 0
    launch(_derive, len(step.rows))(
        known, step, token_ids, positions, seq_lens, slots[0], apart, tables, *tables.stride()[:2], max_len,
        GROUPS=len(slots), BLOCK_SIZE=block_size, BLOCK=triton.next_power_of_2(known.most + 1), num_warps=1,
    )  # fmt: skip


def derive_reference(
    known: SpecTokens,
    step: SpecStep,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slots: Sequence[Tensor],
    tables: Tensor,
    block_size: int,
    max_len: int,
) -> None:
    """As `derive`."""
    for seq, (row, planned) in enumerate(zip(step.rows.tolist(), step.planned.tolist(), strict=True)):
        if planned < 0:
            continue
        start, end = step.query_starts[seq : seq + 2].tolist()
        length, num_drafts = int(known.lengths[row]), min(planned, int(known.num_drafts[row]))
        seq_lens[seq] = length - 1 + end - start
        for at in range(end - start):
            place, counts = length - 1 + at, at <= num_drafts
            drafted = known.drafts[row, at - 1] if counts else 0
            token_ids[start + at] = drafted if at else known.history[row, length - 1]
            positions[start + at] = min(place, max_len - 1)
            for group, table in zip(slots, tables, strict=True):
                slot = table[row, place // block_size] * block_size + place % block_size if counts else -1
                group[start + at] = slot


@triton.jit
def _verify(
    known: tl.tuple,
    step: tl.tuple,
    drawn: tl.tensor,
    out: tl.tensor,
    seeds: tl.tensor,
    rates: tl.tensor,
    later: tl.tensor,
    BLOCK: tl.constexpr,
    DRAFTED: tl.constexpr,
    LATER: tl.constexpr,
) -> None:
    """Grid (sequences)."""
    seq = tl.program_id(0)
    if later is not None:  # noqa: SIM102
        if tl.load(later) == LATER:
            return
    first = tl.load(step.draw_starts + seq)
    count, found = 0, 0
    if first >= 0:
        row = tl.load(step.rows + seq).to(tl.int64)
        length, planned = tl.load(known.lengths + row), tl.maximum(tl.load(step.planned + seq), 0)
        num_drafts = tl.minimum(planned, tl.load(known.num_drafts + row))
        at = tl.arange(0, BLOCK)
        tokens = tl.load(drawn + first + at, mask=at <= planned, other=-1)
        drafts = tl.load(known.drafts + row * known.most + at, mask=at < num_drafts, other=-2)
        differs = tokens != drafts
        if rates is not None:
            rate = tl.load(rates + at, mask=at < num_drafts, other=0.0)
            differs = tl.rand(tl.load(seeds + first), length) >= rate
            tokens = tl.where(differs, tokens, drafts)
        count = tl.min(tl.where(differs, at, BLOCK), 0) + 1
        tl.store(known.history + row * known.width + length + at, tokens.to(tl.int32), mask=at < count)
        tl.store(known.lengths + row, length + count)
        tl.store(out + tl.num_programs(0) + first + at, tokens.to(tl.int32), mask=at <= planned)
        found = num_drafts
    tl.store(out + seq, count | (found << DRAFTED))


def verify(
    known: SpecTokens,
    step: SpecStep,
    drawn: Tensor,
    seeds: Tensor | None = None,
    rates: Tensor | None = None,
    later: Tensor | None = None,
) -> Tensor:
    """[B + N] int32: how many tokens each sequence got, 0 if it drew none, and from bit DRAFTED on how many
    drafts it had; behind them the tokens of all draws. What it got is part of `known` now.

    `drawn` [N] int64. With `rates` [most] float32 a draft counts, whatever it is, if a number that belongs to
    the row's seed (`seeds` [N]) and position is below its rate; these fall. Where LATER stands in `later`
    nothing is done.
    """
    out = torch.empty(len(step.rows) + len(drawn), dtype=torch.int32, device=drawn.device)
    block = triton.next_power_of_2(known.most + 1)
    launch(_verify, len(step.rows))(
        known, step, drawn, out, seeds, rates, later,
        BLOCK=block, DRAFTED=DRAFTED, LATER=LATER, num_warps=1,
    )  # fmt: skip
    return out


def verify_reference(known: SpecTokens, step: SpecStep, drawn: Tensor, later: Tensor | None = None) -> Tensor:
    """As `verify`, without rates."""
    if later is not None and later[0] == LATER:
        return torch.empty(len(step.rows) + len(drawn), dtype=torch.int32, device=drawn.device)
    counts = torch.zeros(len(step.rows), dtype=torch.int32, device=drawn.device)
    for seq, (row, first) in enumerate(zip(step.rows.tolist(), step.draw_starts.tolist(), strict=True)):
        if first < 0:
            continue
        length = int(known.lengths[row])
        num_drafts = min(max(int(step.planned[seq]), 0), int(known.num_drafts[row]))
        count = 1
        while count <= num_drafts and known.drafts[row, count - 1] == drawn[first + count - 1]:
            count += 1
        known.history[row, length : length + count] = drawn[first : first + count]
        known.lengths[row] = length + count
        counts[seq] = count | num_drafts << DRAFTED
    return torch.cat((counts, drawn.int()))


@triton.jit
def _look_up(
    known: tl.tuple,
    step: tl.tuple,
    best: tl.tensor,
    arrivals: tl.tensor,
    least: tl.tensor,
    CONTEXT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (sequences, splits). `best` and `arrivals` [B] are zeros before and after."""
    seq, splits = tl.program_id(0), tl.num_programs(1)
    if tl.load(step.draw_starts + seq) >= 0:
        row = tl.load(step.rows + seq).to(tl.int64)
        length = tl.load(known.lengths + row)
        history = known.history + row * known.width
        found = tl.zeros([TILE], tl.int64)
        for first in range(tl.program_id(1) * TILE, length, splits * TILE):
            place = first + tl.arange(0, TILE)
            alike, num_alike, back, some = place < length, tl.zeros([TILE], tl.int32), 1, 1
            while (back <= CONTEXT) & (some > 0):
                end = tl.load(history + tl.maximum(length - back, 0))
                there = (place >= back) & (place < length)
                seen = tl.load(history + place - back, mask=there, other=-1)
                alike = alike & (seen == end) & (seen >= 0)
                num_alike += alike.to(tl.int32)
                some, back = tl.sum(alike.to(tl.int32), 0), back + 1
            key = (num_alike.to(tl.int64) << 32) | place
            found = tl.maximum(found, tl.where(num_alike >= least, key, 0))
        tl.atomic_max(best + seq, tl.max(found, 0))
        if tl.atomic_add(arrivals + seq, 1) == splits - 1:
            chosen = tl.atomic_max(best + seq, 0)
            place, at = (chosen & 0xFFFFFFFF).to(tl.int32), tl.arange(0, BLOCK)
            wanted = at < tl.where(chosen > 0, known.most, 0)
            # Behind the end it goes on repeating itself.
            tokens = tl.load(history + place + at % tl.maximum(length - place, 1), mask=wanted, other=-1)
            count = tl.min(tl.where(tokens < 0, at, BLOCK), 0)
            tl.store(known.drafts + row * known.most + at, tokens.to(tl.int64), mask=wanted)
            tl.store(known.num_drafts + row, tl.minimum(count, known.most))
            tl.store(best + seq, 0)
            tl.store(arrivals + seq, 0)


def look_up(known: SpecTokens, step: SpecStep, scratch: Tensor, least: int) -> None:
    """Drafts for the rows that have just drawn: of all places where the last `least` tokens stood before, the
    one counts before which most of the last CONTEXT tokens stand, and the latest of equals.

    `scratch` [2, B or more] int64, zeros before and after.
    """
    splits = max(1, min(_SPLITS, known.width // _TILE))
    launch(_look_up, len(step.rows), splits)(
        known, step, scratch[0], scratch[1], least, CONTEXT=CONTEXT, TILE=_TILE,
        BLOCK=triton.next_power_of_2(known.most + 1), num_warps=4,
    )  # fmt: skip


def look_up_reference(known: SpecTokens, step: SpecStep, least: int) -> None:
    """As `look_up`."""
    for row, first in zip(step.rows.tolist(), step.draw_starts.tolist(), strict=True):
        if first < 0:
            continue
        tokens = known.history[row, : known.lengths[row]].tolist()
        best = 0, 0
        for place in range(1, len(tokens)):
            back = 1
            while back <= min(CONTEXT, place) and tokens[place - back] == tokens[-back] >= 0:
                back += 1
            best = max(best, (back - 1, place)) if back > least else best
        guessed = (tokens[best[1] :] * known.most)[: known.most] if best[0] else []
        guessed = guessed[: next((at for at, token in enumerate(guessed) if token < 0), len(guessed))]
        known.num_drafts[row] = len(guessed)
        known.drafts[row, : len(guessed)] = torch.tensor(guessed, dtype=torch.int64)


@triton.jit
def _place(
    rows: tl.tensor,
    last: tl.tensor,
    num_slots: tl.tensor,
    tables: tl.tensor,
    group_stride: tl.tensor,
    table_stride: tl.tensor,
    positions: tl.tensor,
    stride: tl.tensor,
    seq_lens: tl.tensor,
    ahead: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Grid (sequences). Slots lie behind the positions, `stride` apart, one group after the other."""
    seq = tl.program_id(0)
    row, room = tl.load(rows + seq).to(tl.int64), tl.load(num_slots + seq)
    end = tl.load(last + seq) + ahead
    there = tl.maximum(tl.minimum(end, room - 1), WIDTH - 1)
    tl.store(seq_lens + seq, (there + 1).to(tl.int32))
    for at in tl.static_range(WIDTH):
        position, into = there - (WIDTH - 1 - at), positions + seq * WIDTH + at
        tl.store(into, position)
        for group in tl.static_range(GROUPS):
            block = tl.load(tables + group * group_stride + row * table_stride + position // BLOCK_SIZE)
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(into + (1 + group) * stride, tl.where(end < room, slot, -1))


def place(
    rows: Tensor, last: Tensor, num_slots: Tensor, tables: Tensor, ahead: int, width: int, block_size: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """See `worker.drafter.place`, the same in torch. `rows` [B] int32, `last` and `num_slots` [B] int64,
    `tables` [groups, rows, blocks]."""
    count, groups, size = len(rows), len(tables), len(rows) * width
    stride = -(-size // _ALIGN) * _ALIGN
    made = torch.empty((1 + groups, stride), dtype=torch.int64, device=rows.device)
    seq_lens = torch.empty(count, dtype=torch.int32, device=rows.device)
    launch(_place, count)(
        rows, last, num_slots, tables, *tables.stride()[:2], made, stride, seq_lens, ahead,
        GROUPS=groups, WIDTH=width, BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip
    return made[0, :size], seq_lens, list(made[1:, :size])
