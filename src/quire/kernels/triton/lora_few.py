"""Adapters of few rows each: what they add to a product is made before it, and added at its end.

Rows are sorted by slot as in `lora.py`, and cut into tiles of few rows. A program reads some ranks of A, or
outputs of B, of one adapter, and has them meet one row after the other. Both are asked for before the kernel
in front has ended, and the product reads its weight while they work. Rows may be pairs of a token and one of
its experts: their slot is that of the token and the expert in one number.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.experts import ExpertAdapters
from quire.kernels.ops import Adapted
from quire.kernels.triton.launch import launch, overlap
from quire.kernels.triton.pairs import most_tiles, sort

HEIGHT = 4
"""Rows in a tile."""
_NUMBERS = 4096
"""Of A or B, that a program has at least."""


class Few(NamedTuple):
    """The slots of rows, and what `sort` makes of them."""

    slots: Tensor
    """[T] int32; -1: none"""
    order: Tensor
    work: Tensor
    most: int
    """Tiles, however the rows fall."""


class Added(NamedTuple):
    """What adapters add to the rows of a product."""

    values: Tensor | None = None
    """[T, outputs]; what rows without an adapter have there means nothing"""
    slots: Tensor | None = None


NOTHING = Added()


def assign_few(slots: Tensor, num_slots: int) -> Few:
    # Not ahead: kernels read what this makes before they have waited for the one in front of them.
    return Few(slots, *sort(slots, num_slots, HEIGHT, ahead=False), most_tiles(len(slots), num_slots, HEIGHT))


@triton.jit
def _place_of(work: tl.tensor, strides: tl.tuple, EXPERTS: tl.constexpr) -> tl.tensor:
    """Of the tile of a program: where its adapter is, its first row, and its end; the same if there is no
    such tile."""
    tile = tl.program_id(0)
    is_one, entry = tile < tl.load(work), work + 4 + 4 * tile
    slot = tl.load(entry, mask=is_one, other=0).to(tl.int64)
    first, end = tl.load(entry + 1, mask=is_one, other=0), tl.load(entry + 2, mask=is_one, other=0)
    return slot // EXPERTS * strides[0] + slot % EXPERTS * strides[1], first, end


# The product behind both reads x without waiting for them: what made x has to have ended before the first of
# them lets the next kernel come.
@triton.jit
def _shrink(
    h: tl.tensor,
    x: tl.tensor,
    a: tl.tensor,
    order: tl.tensor,
    work: tl.tensor,
    size_in: tl.tensor,
    x_stride: tl.tensor,
    strides: tl.tuple,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    NUM: tl.constexpr,
    RANKS: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (tiles, WIDTH / RANKS). `TOP` of the rows share one of x."""
    p, k = tl.program_id(1) * RANKS + tl.arange(0, RANKS), tl.arange(0, LENGTH)
    place, first, end = _place_of(work, strides, EXPERTS)
    known = (p < tl.where(first < end, WIDTH, 0))[:, None] & (k < size_in)[None, :]
    w = tl.load(a + place + p[:, None] * size_in + k[None, :], mask=known, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i in tl.static_range(NUM):
        if first + i < end:
            m = tl.load(order + first + i).to(tl.int64)
            values = tl.load(x + m // TOP * x_stride + k, mask=k < size_in, other=0.0).to(tl.float32)
            tl.store(h + m * WIDTH + p, tl.sum(w.to(tl.float32) * values[None, :], 1), mask=p < WIDTH)


@triton.jit
def _expand(
    out: tl.tensor,
    h: tl.tensor,
    b: tl.tensor,
    order: tl.tensor,
    work: tl.tensor,
    out_stride: tl.tensor,
    strides: tl.tuple,
    SIZES: tl.constexpr,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (tiles, outputs of each part / ROWS)."""
    part, n, last = _outputs_of(SIZES, ROWS)
    r = tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    place, first, end = _place_of(work, strides, EXPERTS)
    known = (n < tl.where(first < end, last, 0))[:, None] & (r < RANK)[None, :]
    w = tl.load(b + place + n[:, None] * RANK + r[None, :], mask=known, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(NUM):
        if first + i < end:
            m = tl.load(order + first + i).to(tl.int64)
            values = tl.load(h + m * (len(SIZES) * RANK) + part * RANK + r, mask=r < RANK, other=0.0)
            y = tl.sum(w.to(tl.float32) * values[None, :], 1)
            tl.store(out + m * out_stride + n, y.to(out.dtype.element_ty), mask=n < last)


@triton.jit
def _outputs_of(SIZES: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Of a program: their part, which they are, and where the part ends."""
    left, part, n, end, size = tl.program_id(1), 0, 0, 0, 0
    for i in tl.static_range(len(SIZES)):
        if left >= 0:
            part, n, end = i, size + left * ROWS, size + SIZES[i]
        left -= tl.cdiv(SIZES[i], ROWS)
        size += SIZES[i]
    return part, n + tl.arange(0, ROWS), end


@triton.jit
def plus_added(
    acc: tl.tensor, added: tl.tensor, slots: tl.tensor, m: tl.tensor, place: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """The sums of rows `m`, with what is added to those that have an adapter."""
    has = tl.load(slots + m, mask=m >= 0, other=-1) >= 0
    return acc + tl.load(added + place, mask=inside & has[:, None], other=0.0).to(tl.float32)


def added(x: Tensor, adapted: Adapted, *, top: int = 1, ahead: bool | None = None) -> Added:
    """What the kernel of a product is to add. `top` rows have one of x."""
    a, b, sizes, rows = adapted
    if ahead is None:
        ahead = overlap(len(x), min(a.shape[-1], sum(sizes)))
    num, (width, size_in), rank = len(rows.slots), a.shape[-2:], b.shape[-1]
    h = torch.empty(num, width, dtype=torch.float32, device=x.device)
    length, block = triton.next_power_of_2(size_in), max(triton.next_power_of_2(rank), 16)
    ranks, outputs = max(_NUMBERS // length, 1), max(_NUMBERS // block, 8)
    own = {"NUM": HEIGHT, "EXPERTS": _experts(a), "OVERLAP": ahead, "launch_pdl": ahead}
    launch(_shrink, rows.most, triton.cdiv(width, ranks))(
        h, x, a, rows.order, rows.work, size_in, x.stride(0), _strides(a), WIDTH=width, TOP=top, RANKS=ranks,
        LENGTH=length, **own, num_warps=4 if length <= _NUMBERS else 8,
    )  # fmt: skip
    out = torch.empty(num, sum(sizes), dtype=x.dtype, device=x.device)
    launch(_expand, rows.most, sum(triton.cdiv(size, outputs) for size in sizes))(
        out, h, b, rows.order, rows.work, out.stride(0), _strides(b), SIZES=sizes, RANK=rank, ROWS=outputs,
        BLOCK=block, **own, num_warps=4,
    )  # fmt: skip
    return Added(out, rows.slots)


def _experts(matrices: Tensor) -> int:
    return matrices.shape[1] if matrices.ndim == 4 else 1


def _strides(matrices: Tensor) -> tuple[int, int]:
    """Of slots, and of experts inside of them."""
    return matrices.stride(0), matrices.stride(1) if matrices.ndim == 4 else 0


class PairAdapters(NamedTuple):
    """What adapters add to the products of a layer's experts."""

    adapters: ExpertAdapters
    pairs: Few
    top: int

    @staticmethod
    def of(adapters: ExpertAdapters, ids: Tensor) -> "PairAdapters":
        """`ids`: [T, per token], all of them here"""
        num_slots, num_experts = adapters.down_a.shape[:2]
        slots = adapters.tokens[:, None]
        pairs = torch.where(slots >= 0, slots * num_experts + ids, -1).flatten()
        return PairAdapters(adapters, assign_few(pairs, num_slots * num_experts), ids.shape[1])

    def up(self, x: Tensor) -> Added:
        """By pairs, from tokens."""
        a, b = self.adapters.gate_up_a, self.adapters.gate_up_b
        half = b.shape[2] // 2
        return added(x, Adapted(a, b, (half, half), self.pairs), top=self.top, ahead=False)

    def down(self, x: Tensor, order: Tensor | None = None) -> Added:
        """By pairs, or by those sorted in some `order`."""
        a, b, pairs = self.adapters.down_a, self.adapters.down_b, self.pairs
        if order is not None:
            pairs = assign_few(pairs.slots[order], a.shape[0] * a.shape[1])
        return added(x, Adapted(a, b, (b.shape[2],), pairs), ahead=False)
