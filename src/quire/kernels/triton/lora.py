"""LoRA in a linear layer, each row with its adapter: h = x A^T (shrink), then h B^T is added (expand).

Rows are sorted by the slot of their adapter once per step, and divided into tiles of one slot. The shrink
reads each adapter once, in as many splits as fill the GPU. For few rows, the GEMM kernel itself expands at
its end (`expanded`); otherwise a separate kernel follows it. If adapters have few rows each, `lora_few.py` is
used. Sums have a fixed order, and a row's result does not depend on other rows.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import batch_invariant
from quire.kernels.ops import LoRAHeads
from quire.kernels.triton.launch import MOST_ROWS, follow, follow_late, launch, overlap
from quire.kernels.triton.lora_few import FewRows, lora_outputs, outputs_of
from quire.kernels.triton.moe_align import most_tiles, sort, tile_at
from quire.kernels.triton.tile_dots import all_of, arrivals_of, empty, times, upright

_SHORT, _TALL = 16, 64
"""Rows per tile for steps with few rows, and with more."""
_LENGTH, _MOST_SPLITS = 128, 8
"""Elements of x and A that a program loads at a time; maximum splits."""
_PROGRAMS = 512, 128
"""Number of programs up to which x and A are split along K, for few rows and for more."""
_FEW = 4
"""Minimum mean number of rows per adapter for which rows are processed in tiles."""
_CHUNK, _WIDE = 64, tl.constexpr(128)
"""Ranks that are multiplied at a time: by `_expand` those of one slot, by a GEMM kernel those of several
slots."""
_MOST_RANKS = 512
"""Maximum ranks of all tiles that a GEMM kernel expands; with more, a separate kernel is faster."""
_OUTPUTS = 128
"""Outputs per program of `_expand`."""


class LoRARows(NamedTuple):
    """Adapter slots of a step's rows, and the rows sorted by slot into tiles: `order` and `work` are the
    result of `moe_align.sort`."""

    slots: Tensor
    """[T] int32, adapter slot of each row, -1 for none"""
    order: Tensor
    work: Tensor
    height: int
    """Rows per tile."""
    most: int
    """Maximum number of tiles, for any distribution of rows over slots."""
    few: FewRows | None
    """Arguments of the kernels of lora_few.py, which are used if the adapters have few rows each on average;
    otherwise None."""


def assign(slots: Tensor, num_slots: int) -> LoRARows:
    num, is_fixed = len(slots), batch_invariant.is_on()
    height = _SHORT if num <= MOST_ROWS and not is_fixed else _TALL
    order, work = sort(slots, num_slots, height, ahead=False)
    few = FewRows(slots, num) if not is_fixed and 1 < num < min(MOST_ROWS + 1, _FEW * num_slots) else None
    return LoRARows(slots, order, work, height, most_tiles(num, num_slots, height), few)


@triton.jit
def begin(OVERLAP: tl.constexpr, LATE: tl.constexpr) -> tl.tensor:
    if OVERLAP and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    else:
        follow(OVERLAP)


@triton.jit
def wait(OVERLAP: tl.constexpr, LATE: tl.constexpr) -> tl.tensor:
    if OVERLAP and LATE:
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["num"])
def _shrink(
    h: tl.tensor, x: tl.tensor, a: tl.tensor, order: tl.tensor, work: tl.tensor, parts: tl.tensor,
    arrivals: tl.tensor, num: tl.tensor, size_in: tl.tensor, x_stride: tl.tensor, a_stride: tl.tensor,
    WIDTH: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr, SPLITS: tl.constexpr,
    LATE: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile [NUM, ROWS] of `h` = x A^T [T, WIDTH] in split-K; the last split to finish sums all of
    them. `arrivals` is zero before and after. Grid: (tiles, WIDTH / ROWS, SPLITS)."""
    tile, split = tl.program_id(0), tl.program_id(2)
    follow_late(OVERLAP, LATE)
    if tile >= tl.load(work):
        return
    slot, _, end, m, at = tile_at(order, work, tile, NUM)
    slot, valid, p = slot.to(tl.int64), at < end, tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    share = tl.cdiv(tl.cdiv(size_in, LENGTH), SPLITS) * LENGTH
    first = split * share
    acc = empty(NUM, ROWS)
    for start in range(first, tl.minimum(first + share, size_in), LENGTH):
        k = start + tl.arange(0, LENGTH)
        inside = (k < size_in)[None, :]
        w = tl.load(
            a + slot * a_stride + p[:, None] * size_in + k[None, :],
            mask=(p < WIDTH)[:, None] & inside,
            other=0.0,
        )
        values = tl.load(x + m[:, None] * x_stride + k[None, :], mask=valid[:, None] & inside, other=0.0)
        acc = times(values, w.to(values.dtype), acc)
    acc = upright(acc, NUM)
    inside, place = valid[:, None] & (p < WIDTH)[None, :], m[:, None] * WIDTH + p[None, :]
    if SPLITS > 1:
        tl.store(parts + split * num * WIDTH + place, acc, mask=inside)
        tl.debug_barrier()
        arrival = arrivals + tile * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(arrival, 1) < SPLITS - 1:
            return
        tl.store(arrival, 0)
        acc = all_of(parts + place, inside, num * WIDTH, SPLITS)
    tl.store(h + place, acc.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _gather(
    h: tl.tensor, a: tl.tensor, ids: tl.tensor, slots: tl.tensor, a_stride: tl.tensor,
    RANK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the row of A [slots, vocab, RANK] of a token's slot and id to `h` [T, RANK]. Grid: (tokens,)."""
    token, r = tl.program_id(0), tl.arange(0, BLOCK)
    follow(OVERLAP)
    slot, id = tl.load(slots + token).to(tl.int64), tl.load(ids + token).to(tl.int64)
    if slot >= 0:
        row = tl.load(a + slot * a_stride + id * RANK + r, mask=r < RANK)
        tl.store(h + token * RANK + r, row.to(h.dtype.element_ty), mask=r < RANK)


@triton.jit
def _expand(
    out: tl.tensor, h: tl.tensor, b: tl.tensor, order: tl.tensor, work: tl.tensor, out_stride: tl.tensor,
    b_stride: tl.tensor,
    SIZES: tl.constexpr, RANK: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Add h B^T for shrunk rows h to a tile of `out`. Grid: (tiles, outputs of each part / ROWS)."""
    tile = tl.program_id(0)
    part, n, end = outputs_of(SIZES, ROWS)
    follow(OVERLAP)
    if tile >= tl.load(work):
        return
    slot, _, last, m, at = tile_at(order, work, tile, NUM)
    slot, valid = slot.to(tl.int64), at < last
    acc = empty(NUM, ROWS)
    for start in tl.static_range(0, RANK, CHUNK):
        r = start + tl.arange(0, CHUNK)
        inside = (r < RANK)[None, :]
        w = tl.load(
            b + slot * b_stride + n[:, None] * RANK + r[None, :], mask=(n < end)[:, None] & inside, other=0.0
        )
        values = tl.load(
            h + (m * (len(SIZES) * RANK) + part * RANK)[:, None] + r[None, :],
            mask=valid[:, None] & inside,
            other=0.0,
        )
        acc = times(values, w.to(values.dtype), acc)
    acc = upright(acc, NUM)
    place, inside = out + m[:, None] * out_stride + n[None, :], valid[:, None] & (n < end)[None, :]
    acc += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def part_of(n: tl.tensor, ENDS: tl.constexpr) -> tl.tensor:
    """Return the index of the layer's part (such as queries) to which each output `n` belongs; ENDS are the
    ends of all parts but the last."""
    part = n * 0
    for i in tl.static_range(len(ENDS)):
        part += (n >= ENDS[i]).to(tl.int32)
    return part


@triton.jit
def reached(
    adapted: tl.tuple, first: tl.tensor, start: tl.tensor,
    RANK: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a block [ROWS, _WIDE] of B for outputs from `first` on. Its columns are ranks: those of the slots
    of all tiles are concatenated, and the block begins at column `start`. Repetitions of a slot are zeros."""
    _, b, _, work, outputs, stride = adapted
    n, slot = first + tl.arange(0, ROWS), slots_at(work, start, RANK)
    r = (start + tl.arange(0, _WIDE)) % RANK
    return tl.load(
        b + slot.to(tl.int64)[None, :] * stride + n[:, None] * RANK + r[None, :],
        mask=(n < outputs)[:, None] & (slot >= 0)[None, :],
        other=0.0,
    )


@triton.jit
def slots_at(work: tl.tensor, start: tl.tensor, RANK: tl.constexpr) -> tl.tensor:
    tile = (start + tl.arange(0, _WIDE)) // RANK
    valid = tile < tl.load(work)
    slot = tl.load(work + 4 + 4 * tile, mask=valid, other=-2)
    before = tl.load(work + 4 * tile, mask=valid & (tile > 0), other=-2)
    return tl.where(slot == before, -2, slot)


@triton.jit
def expanded(
    adapted: tl.tuple, m: tl.tensor, num: tl.tensor, first: tl.tensor, reach: tl.tensor,
    RANK: tl.constexpr, ENDS: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the LoRA outputs [NUM, ROWS] of rows `m` for ROWS outputs of one part, from `first` on. `reach`
    is the block of B that `reached` loads for column 0. The shrunk values of a row are 0 for slots other than
    its own."""
    h, _, slots, work, _, _ = adapted
    slot = tl.load(slots + m, mask=m < num, other=-1)
    h_at = h + (m * ((len(ENDS) + 1) * RANK) + part_of(first, ENDS) * RANK)[:, None]
    acc = _dot_own_slot(h_at, slot, reach, 0, work, empty(NUM, ROWS), RANK)
    for start in tl.range(_WIDE, tl.load(work) * RANK, _WIDE, num_stages=1):
        w = reached(adapted, first, start, RANK, ROWS)
        acc = _dot_own_slot(h_at, slot, w, start, work, acc, RANK)
    return upright(acc, NUM)


@triton.jit
def _dot_own_slot(
    h_at: tl.tensor, row_slot: tl.tensor, w: tl.tensor, start: tl.tensor, work: tl.tensor, acc: tl.tensor,
    RANK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    slot, r = slots_at(work, start, RANK), (start + tl.arange(0, _WIDE)) % RANK
    values = tl.load(h_at + r[None, :], mask=row_slot[:, None] == slot[None, :], other=0.0)
    w = tl.where(w * 0 == 0, w, 0.0)  # an infinity would turn zeros of other rows into NaN
    return times(values, w.to(values.dtype), acc)


def added_to_one(x: Tensor, adapted: LoRAHeads) -> Tensor | None:
    """Return the LoRA outputs [1, outputs] of a single row x [1, K]."""
    return lora_outputs(x, adapted._replace(tokens=FewRows(adapted.tokens.slots, 1)), late=False).values


def shrink(x: Tensor, adapted: LoRAHeads, *, late: bool = False) -> Tensor:
    """Return x A^T [T, parts * rank] for x [T, K]; rows without an adapter are undefined. If `late`, the next
    kernel may read x before this one has ended, but must wait for its end before it reads the result."""
    a, rows = adapted.a, adapted.tokens
    (num, size_in), width = x.shape, a.shape[1]
    h = torch.empty(num, width, dtype=x.dtype, device=x.device)
    ahead = overlap(num, min(size_in, sum(adapted.sizes)))
    block = min(_block(width), 64)
    stripes, programs = triton.cdiv(width, block), _PROGRAMS[num > MOST_ROWS]
    splits = min(max(programs // (rows.most * stripes), 1), triton.cdiv(size_in, _LENGTH), _MOST_SPLITS)
    if batch_invariant.is_on():
        splits = min(triton.cdiv(size_in, _LENGTH), _MOST_SPLITS)
    elif num > MOST_ROWS:  # any number of rows: a few kernel variants, all compiled at the start
        splits = 1 << splits.bit_length() - 1
    parts = h
    if splits > 1:
        parts = torch.empty(splits * num * width, dtype=torch.float32, device=x.device)
    launch(_shrink, rows.most, stripes, splits)(
        h, x, a, rows.order, rows.work, parts, arrivals_of(x.device), num, size_in, x.stride(0), a.stride(0),
        WIDTH=width, NUM=rows.height, ROWS=block, LENGTH=_LENGTH, SPLITS=splits, LATE=late, OVERLAP=ahead,
        launch_pdl=ahead, num_warps=4, num_stages=2 if _SHORT < rows.most <= MOST_ROWS else 3,
    )  # fmt: skip
    return h


def is_short(adapted: LoRAHeads) -> bool:
    """Whether the GEMM kernel itself expands the shrunk rows (`expanded`)."""
    return bool(adapted.tokens.most * adapted.b.shape[2] <= _MOST_RANKS)


def expand(out: Tensor, h: Tensor, adapted: LoRAHeads) -> Tensor:
    """Add h B^T to `out` [T, outputs] in place, for the shrunk rows `h` [T, parts * rank]."""
    rows, rank, ahead = adapted.tokens, adapted.b.shape[2], overlap(*out.shape)
    assert out.stride(1) == 1
    stripes = sum(triton.cdiv(size, _OUTPUTS) for size in adapted.sizes)
    launch(_expand, rows.most, stripes)(
        out, h, adapted.b, rows.order, rows.work, out.stride(0), adapted.b.stride(0), SIZES=adapted.sizes,
        RANK=rank, NUM=rows.height, ROWS=_OUTPUTS, CHUNK=min(_block(rank), _CHUNK), OVERLAP=ahead,
        launch_pdl=ahead, num_warps=4,
    )  # fmt: skip
    return out


def add(out: Tensor, x: Tensor, adapted: LoRAHeads) -> Tensor:
    """Add the LoRA outputs of a linear layer for x [T, K] to `out` [T, outputs] in place; see `Ops.lora`."""
    return expand(out, shrink(x, adapted), adapted) if len(x) else out


def add_rows(out: Tensor, ids: Tensor, adapted: LoRAHeads) -> Tensor:
    """Add the LoRA outputs of an embedding layer for the token ids `ids` [T] to `out` in place; see
    `Ops.lora_rows`."""
    a, num, rank = adapted.a, len(ids), adapted.a.shape[2]
    h, ahead = torch.empty(num, rank, dtype=out.dtype, device=out.device), overlap(*out.shape)
    if not num:
        return out
    launch(_gather, num)(
        h, a, ids, adapted.tokens.slots, a.stride(0), RANK=rank, BLOCK=_block(rank), OVERLAP=ahead,
        launch_pdl=ahead, num_warps=1,
    )  # fmt: skip
    return expand(out, h, adapted)


def _block(rank: int) -> int:
    return max(int(triton.next_power_of_2(rank)), 16)


def _ends(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the end offsets of a layer's parts (such as queries, keys and values) in its outputs, without
    the last."""
    return tuple(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))


class Expansion(NamedTuple):
    """LoRA arguments of a GEMM kernel: tensors that it reads, and compile-time constants."""

    reads: Any
    """Shrunk rows, B, slots of rows, `LoRARows.work`, number of outputs, stride between slots; or with a rank
    of 0 an `AddedRows`"""
    rank: int
    ends: tuple[int, ...]

    @staticmethod
    def of(adapted: LoRAHeads, h: Tensor) -> "Expansion":
        b, rows = adapted.b, adapted.tokens
        reads = h, b, rows.slots, rows.work, b.shape[1], b.stride(0)
        return Expansion(reads, b.shape[2], _ends(adapted.sizes))
