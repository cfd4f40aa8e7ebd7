"""LoRA for few rows per adapter: outputs are computed before the GEMM, and its kernel adds them at the end.

A program reads a part of A, or some outputs of B, of one adapter, for one row or a few. It loads this part
before the previous kernel has ended, while the GEMM already reads its weight. Partial sums of x A^T are added
in the kernel that reads B, always in the same order.

Rows may be (token, expert) pairs; their slot combines the token's slot and the expert. If there are many,
they are sorted by slot as in `lora.py`, in tiles of few rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.ops import LoRAHeads
from quire.kernels.reference.moe import ExpertAdapters
from quire.kernels.triton.launch import follow_late, launch, overlap
from quire.kernels.triton.moe_align import most_tiles, sort

_HEIGHT = 4
"""Rows per tile if the rows are sorted."""
_LENGTH, _STEPS = 2048, 4
"""Inputs of A per step of a program, and number of steps; for a single row, it processes all inputs."""
_NUMBERS, _OUTPUTS = 4096, 8192
"""Elements of A per step of a program; elements of B per program."""


class FewRows(NamedTuple):
    """Adapter slots of rows, and the rows sorted by slot (the result of `sort`) if there are many."""

    slots: Tensor
    """[T] int32, adapter slot of each row, -1 for none"""
    most: int
    """Maximum number of tiles, for any distribution of rows over slots."""
    order: Tensor | None = None
    work: Tensor | None = None

    @property
    def height(self) -> int:
        return 1 if self.order is None else _HEIGHT


class AddedRows(NamedTuple):
    """LoRA outputs of the rows of a GEMM, which its kernel adds, and the adapter slots of the rows."""

    values: Tensor | None = None
    """[T, outputs]; rows without an adapter are undefined"""
    slots: Tensor | None = None


NO_LORA = AddedRows()


@triton.jit
def _tile_of(
    slots: tl.tensor, work: tl.tensor, strides: tl.tuple, NUM: tl.constexpr, EXPERTS: tl.constexpr
) -> tl.tensor:
    """Return for a program the offset in elements of its adapter's weights, and the range of its rows: the
    first and the end, which are equal if the program has no rows."""
    first = tl.program_id(0)
    if NUM == 1:
        slot = tl.load(slots + first).to(tl.int64)
        end = first + (slot >= 0)
    else:
        is_one, entry = first < tl.load(work), work + 4 + 4 * first
        slot = tl.load(entry, mask=is_one, other=0).to(tl.int64)
        first, end = tl.load(entry + 1, mask=is_one, other=0), tl.load(entry + 2, mask=is_one, other=0)
    return slot // EXPERTS * strides[0] + slot % EXPERTS * strides[1], first, end


@triton.jit
def _row_of(order: tl.tensor, at: tl.tensor, NUM: tl.constexpr) -> tl.tensor:
    m = at
    if NUM > 1:
        m = tl.load(order + at)
    return m.to(tl.int64)


# With `LATE`, the GEMM after `_shrink` and `_expand` reads x without waiting for these kernels. The kernel
# that wrote x must therefore have ended before `_shrink` allows the next kernel to start.
@triton.jit(do_not_specialize=["num"])
def _shrink(
    h: tl.tensor, x: tl.tensor, a: tl.tensor, slots: tl.tensor, order: tl.tensor, work: tl.tensor,
    num: tl.tensor, size_in: tl.tensor, x_stride: tl.tensor, strides: tl.tuple,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr, NUM: tl.constexpr, RANKS: tl.constexpr,
    LENGTH: tl.constexpr, STEPS: tl.constexpr, LATE: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute x A^T for a tile of rows, in split-K. Row m is computed from row m / TOP of x. Grid: (tiles,
    WIDTH / RANKS, size_in / (LENGTH * STEPS))."""
    p, split = tl.program_id(1) * RANKS + tl.arange(0, RANKS), tl.program_id(2)
    k = split * (LENGTH * STEPS) + tl.arange(0, LENGTH)
    place, first, end = _tile_of(slots, work, strides, NUM, EXPERTS)
    at, valid = a + place + p[:, None] * size_in, (p < tl.where(first < end, WIDTH, 0))[:, None]
    w = tl.load(at + k[None, :], mask=valid & (k < size_in)[None, :], other=0.0).to(tl.float32)
    follow_late(OVERLAP, LATE)
    for i in tl.static_range(NUM):
        if first + i < end:
            m = _row_of(order, first + i, NUM)
            x_row = x + m // TOP * x_stride
            values = tl.load(x_row + k, mask=k < size_in, other=0.0).to(tl.float32)
            acc = tl.sum(w * values[None, :], 1)
            for step in tl.static_range(1, STEPS):
                q = k + step * LENGTH
                more = tl.load(at + q[None, :], mask=valid & (q < size_in)[None, :], other=0.0)
                values = tl.load(x_row + q, mask=q < size_in, other=0.0).to(tl.float32)
                acc += tl.sum(more.to(tl.float32) * values[None, :], 1)
            tl.store(h + (split * num + m) * WIDTH + p, acc, mask=p < WIDTH)


@triton.jit(do_not_specialize=["num"])
def _expand(
    out: tl.tensor, h: tl.tensor, b: tl.tensor, slots: tl.tensor, order: tl.tensor, work: tl.tensor,
    num: tl.tensor, out_stride: tl.tensor, strides: tl.tuple,
    SIZES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, NUM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the LoRA outputs h B^T for a tile of rows, where h is the sum of the SPLITS partial results of
    `_shrink`. The result of a single row without an adapter is zeros. Grid: (tiles, outputs of each part /
    ROWS)."""
    part, n, last = outputs_of(SIZES, ROWS)
    r, split = tl.arange(0, BLOCK), tl.arange(0, triton.next_power_of_2(SPLITS))
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    place, first, end = _tile_of(slots, work, strides, NUM, EXPERTS)
    valid = (n < tl.where(first < end, last, 0))[:, None] & (r < RANK)[None, :]
    w = tl.load(b + place + n[:, None] * RANK + r[None, :], mask=valid, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(NUM):
        if NUM == 1 or first + i < end:
            m = _row_of(order, first + i, NUM)
            h_at = h + m * (len(SIZES) * RANK) + part * RANK + r[None, :]
            exists = (split < tl.where(first + i < end, SPLITS, 0))[:, None] & (r < RANK)[None, :]
            values = tl.load(h_at + split[:, None] * num * (len(SIZES) * RANK), mask=exists, other=0.0)
            y = tl.sum(w * tl.sum(values, 0)[None, :], 1)
            tl.store(out + m * out_stride + n, y.to(out.dtype.element_ty), mask=n < last)


@triton.jit
def outputs_of(SIZES: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Return for a program the index of its part of the layer (such as queries or keys), the outputs that it
    computes, and the end of that part's outputs."""
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
    """Return the sums `acc` of rows `m` plus the LoRA outputs `added` of the rows that have an adapter."""
    has_adapter = tl.load(slots + m, mask=m >= 0, other=-1) >= 0
    return acc + tl.load(added + place, mask=inside & has_adapter[:, None], other=0.0).to(tl.float32)


def lora_outputs(
    x: Tensor, adapted: LoRAHeads, *, top: int = 1, late: bool = True, ahead: bool | None = None
) -> AddedRows:
    """Return the LoRA outputs that a GEMM kernel adds; row m is computed from row m / top of x. If `late`,
    the GEMM kernel may read x before the LoRA kernels have ended. `ahead`: use PDL (None: see
    `overlap`)."""
    a, b, sizes, rows = adapted
    if ahead is None:
        ahead = overlap(len(x), min(a.shape[-1], sum(sizes)))
    num, (width, size_in), rank = len(rows.slots), a.shape[-2:], b.shape[-1]
    length, steps = triton.next_power_of_2(size_in), 1
    if is_one := num == 1 and rows.height == 1:
        ranks, outputs = 1, _OUTPUTS // 4
    else:
        length = min(length, _LENGTH)
        ranks, outputs, steps = _NUMBERS // length, _OUTPUTS, min(triton.cdiv(size_in, length), _STEPS)
    stripes, splits = triton.cdiv(width, ranks), triton.cdiv(size_in, length * steps)
    block = max(triton.next_power_of_2(rank), 16)
    outputs = max(outputs // block, 8)
    h = torch.empty(splits * num, width, dtype=torch.float32, device=x.device)
    where = rows.slots, rows.order, rows.work, num
    options = {"NUM": rows.height, "EXPERTS": _experts(a), "OVERLAP": ahead, "launch_pdl": ahead}
    launch(_shrink, rows.most, stripes, splits)(
        h, x, a, *where, size_in, x.stride(0), _strides(a), WIDTH=width, TOP=top, RANKS=ranks, LENGTH=length,
        STEPS=steps, LATE=late, **options, num_warps=8 if is_one else 4,
    )  # fmt: skip
    out = torch.empty(num, sum(sizes), dtype=x.dtype, device=x.device)
    launch(_expand, rows.most, sum(triton.cdiv(size, outputs) for size in sizes))(
        out, h, b, *where, out.stride(0), _strides(b), SIZES=sizes, RANK=rank, SPLITS=splits, ROWS=outputs,
        BLOCK=block, **options, num_warps=4,
    )  # fmt: skip
    return AddedRows(out, rows.slots)


def _experts(matrices: Tensor) -> int:
    return matrices.shape[1] if matrices.ndim == 4 else 1


def _strides(matrices: Tensor) -> tuple[int, int]:
    """Return the strides between slots, and between the experts of a slot."""
    return matrices.stride(0), matrices.stride(1) if matrices.ndim == 4 else 0


class PairAdapters(NamedTuple):
    """LoRA weights of a layer's experts, and the sorted (token, expert) pairs."""

    adapters: ExpertAdapters
    pairs: FewRows
    top: int

    @staticmethod
    def of(adapters: ExpertAdapters, ids: Tensor) -> "PairAdapters":
        """Return the LoRA weights with the (token, expert) pairs of all tokens, whose experts are `ids` [T,
        per_token]; no id may be below 0."""
        num_slots, num_experts = adapters.down_a.shape[:2]
        slots = adapters.tokens[:, None]
        pairs = torch.where(slots >= 0, slots * num_experts + ids, -1).flatten()
        return PairAdapters(adapters, _sorted(pairs, num_slots * num_experts), ids.shape[1])

    def up(self, x: Tensor) -> AddedRows:
        """Return the LoRA outputs [pairs, 2 * intermediate] of gate and up, from tokens x [T, hidden]."""
        a, b = self.adapters.gate_up_a, self.adapters.gate_up_b
        half = b.shape[2] // 2
        return lora_outputs(x, LoRAHeads(a, b, (half, half), self.pairs), top=self.top, ahead=False)

    def down(self, x: Tensor, order: Tensor | None = None) -> AddedRows:
        """Return the LoRA outputs [pairs, hidden] of down for x [pairs, intermediate]; with `order`, x and
        the result have the pairs in this order."""
        a, b, pairs = self.adapters.down_a, self.adapters.down_b, self.pairs
        if order is not None:
            pairs = _sorted(pairs.slots[order], a.shape[0] * a.shape[1])
        return lora_outputs(x, LoRAHeads(a, b, (b.shape[2],), pairs), ahead=False)


def _sorted(slots: Tensor, num_slots: int) -> FewRows:
    # No PDL: the kernels read the result before they wait for the previous kernel.
    order, work = sort(slots, num_slots, _HEIGHT, ahead=False)
    return FewRows(slots, most_tiles(len(slots), num_slots, _HEIGHT), order, work)
