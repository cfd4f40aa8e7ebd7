"""Penalties from token counts that stay on the device, and logprobs of chosen ids, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import follow, launch, overlap

_TILE = tl.constexpr(4096)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _apply_penalties(
    logits: tl.tensor, rows: tl.tensor, prompt_seen: tl.tensor, counts: tl.tensor, repetition: tl.tensor,
    frequency: tl.tensor, presence: tl.tensor, vocab: tl.tensor, line: tl.tensor, stride: tl.tensor,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Apply the penalties to one tile of a row of logits. Grid: (rows of logits, tiles)."""
    place, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    follow(OVERLAP)
    row = tl.load(rows + place).to(tl.int64)
    factor = tl.load(repetition + place)
    per_token, per_presence = tl.load(frequency + place), tl.load(presence + place)
    if (row < 0) | ((factor == 1) & (per_token == 0) & (per_presence == 0)):
        return
    inside = ids < vocab
    x = tl.load(logits + place * stride + ids, mask=inside, other=0.0)
    count = tl.load(counts + row * line + ids, mask=inside, other=0).to(tl.float32)
    seen = (count > 0) | (tl.load(prompt_seen + row * line + ids, mask=inside, other=0) != 0)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    x -= per_token * count
    x -= tl.where(count > 0, per_presence, 0.0)
    tl.store(logits + place * stride + ids, x, mask=inside)


@triton.jit(do_not_specialize=["num"])
def _count(
    counts: tl.tensor, rows: tl.tensor, ids: tl.tensor, num: tl.tensor, vocab: tl.tensor,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    follow(OVERLAP)
    row, id = tl.load(rows + at, mask=at < num, other=-1), tl.load(ids + at, mask=at < num, other=-1)
    valid = (row >= 0) & (id >= 0) & (id < vocab)
    place = counts + row.to(tl.int64) * vocab + id
    tl.store(place, tl.load(place, mask=valid, other=0) + 1, mask=valid)


@triton.jit
def _scan(
    logits: tl.tensor, ids: tl.tensor, tops: tl.tensor, sums: tl.tensor, counts: tl.tensor, vocab: tl.tensor,
    stride: tl.tensor,
    NUM: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Store for a tile of a row of logits the maximum, the sum of exponentials, and for each of the NUM
    chosen ids the number of logits at least as large. Grid: (rows, tiles)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    out = row * tl.num_programs(1) + tl.program_id(1)
    follow(OVERLAP)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=_NEVER).to(tl.float32)
    top = tl.max(x, 0)
    tl.store(tops + out, top)
    tl.store(sums + out, tl.sum(tl.exp(x - tl.where(top == _NEVER, 0.0, top)), 0))
    for i in range(NUM):
        chosen = tl.load(logits + row * stride + tl.load(ids + row * NUM + i)).to(tl.float32)
        tl.store(counts + out * NUM + i, tl.sum(((x >= chosen) & (at < vocab)).to(tl.int32), 0))


@triton.jit
def _finish(
    values: tl.tensor, ranks: tl.tensor, logits: tl.tensor, ids: tl.tensor, tops: tl.tensor, sums: tl.tensor,
    counts: tl.tensor, tiles: tl.tensor, stride: tl.tensor,
    NUM: tl.constexpr, TILES: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Combine the tiles of a row into logprobs and ranks. Grid: (rows,)."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    follow(OVERLAP)
    top = tl.load(tops + row * tiles + at, mask=at < tiles, other=_NEVER)
    total = tl.load(sums + row * tiles + at, mask=at < tiles, other=0.0)
    peak = tl.max(top, 0)
    peak = tl.where(peak == _NEVER, 0.0, peak)
    norm = peak + tl.log(tl.sum(tl.where(top == _NEVER, total * 0, total * tl.exp(top - peak)), 0))
    for i in range(NUM):
        chosen = tl.load(logits + row * stride + tl.load(ids + row * NUM + i)).to(tl.float32)
        count = tl.load(counts + (row * tiles + at) * NUM + i, mask=at < tiles, other=0)
        tl.store(values + row * NUM + i, tl.where(chosen - norm == chosen - norm, chosen - norm, _NEVER))
        tl.store(ranks + row * NUM + i, tl.maximum(tl.sum(count, 0), 1).to(tl.int64))


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    prompt_seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply the penalties to `logits` [N, V] in place, as in `sampling/logit_adjustments.py`.

    `prompt_seen` [R, V or more] uint8 is 1 for the ids of the prompt. `counts`, of the same shape, holds how
    often each id was generated. rows[i] is the row of both for row i of the logits, which is unchanged if
    rows[i] is below 0. The penalties are float32 [N].
    """
    (num, vocab), ahead = logits.shape, overlap(len(logits))
    if num:
        launch(_apply_penalties, num, triton.cdiv(vocab, _TILE.value))(
            logits, rows, prompt_seen, counts, repetition, frequency, presence, vocab, counts.shape[1],
            logits.stride(0), OVERLAP=ahead, launch_pdl=ahead, num_warps=8,
        )  # fmt: skip


def count_tokens(counts: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Add 1 to counts[rows[i], ids[i]] for `rows` [N], `ids` [N] and `counts` [R, V]. Rows are unique; -1 is
    skipped."""
    if len(rows):
        ahead, block = overlap(len(rows)), 128
        launch(_count, triton.cdiv(len(rows), block))(
            counts, rows, ids, len(rows), counts.shape[1], BLOCK=block, OVERLAP=ahead, launch_pdl=ahead
        )


def logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logprobs (float32) and ranks (int64, from 1) of the tokens `ids` [N, m] in `logits` [N, V].

    A rank is the number of tokens that are at least as likely. A NaN logprob becomes -inf.
    """
    (num, vocab), num_ids, ahead = logits.shape, ids.shape[1], overlap(len(logits))
    values = torch.empty(num, num_ids, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num, num_ids, dtype=torch.int64, device=logits.device)
    if not num * num_ids:
        return values, ranks
    tiles, stride = triton.cdiv(vocab, _TILE.value), logits.stride(0)
    tops, sums = torch.empty(2, num, tiles, dtype=torch.float32, device=logits.device)
    counts = torch.empty(num * tiles * num_ids, dtype=torch.int32, device=logits.device)
    launch(_scan, num, tiles)(
        logits, ids, tops, sums, counts, vocab, stride, NUM=num_ids, OVERLAP=ahead, launch_pdl=ahead,
        num_warps=8,
    )  # fmt: skip
    launch(_finish, num)(
        values, ranks, logits, ids, tops, sums, counts, tiles, stride, NUM=num_ids,
        TILES=triton.next_power_of_2(tiles), OVERLAP=ahead, launch_pdl=ahead, num_warps=1,
    )  # fmt: skip
    return values, ranks
