"""Mixtures of experts whose weights are in groups of 4 or 8 bits: `kernels/triton/experts.py`, with the codes
of a weight spread on their way to the tensor cores."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.grouped import GroupedWeight, spread
from quire.kernels.triton.launch import follow, launch
from quire.kernels.triton.matmul import tiled
from quire.kernels.triton.pairs import Sorted, most_tiles, sorted_mix


class Tile(NamedTuple):
    """So many pairs, rows of the weight, and words of each at a time."""

    num: int
    rows: int
    length: int
    warps: int
    stages: int


@triton.jit
def _sums(
    of: tl.tuple,
    sizes: tl.tuple,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    LENGTH: tl.constexpr,
) -> tl.tuple:
    """Of a tile's products, [ROWS, NUM], and those of up."""
    RUNS: tl.constexpr = 16 // BITS
    PARTS: tl.constexpr = RUN // LENGTH
    x, weight, heads, token = of
    start, first_n, row, size_in, size_out, x_stride, head_stride = sizes
    n, i = first_n + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    exist = n < size_out
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for step in range(0, tl.cdiv(size_in, RUNS * RUN) * PARTS):
        words = weight.load([row, step * LENGTH])
        if GATED:
            up_words = weight.load([row + size_out, step * LENGTH])
        for run in tl.static_range(RUNS):
            at = step // PARTS * (RUNS * RUN) + step % PARTS * LENGTH + run * RUN
            own = heads + at // GROUP * head_stride + n
            head = tl.load(own, mask=exist)
            if GATED:
                k = at + i
                a = tl.load(
                    x + (token * x_stride)[:, None] + k[None, :], mask=(k < size_in)[None, :], other=0.0
                )
                b = spread(up_words, tl.load(own + size_out, mask=exist), KIND, BITS, run)
                up = tl.dot(b, tl.trans(a), up, input_precision="ieee")
            else:
                a = x.load([start, at])
            b = spread(words, head, KIND, BITS, run)
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    return acc, up


@triton.jit
def _tiles(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    heads: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    work: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    head_stride: tl.tensor,
    groups: tl.tensor,
    TOP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (most tiles * size_out / ROWS). `weight` is a descriptor of tiles.

    With an activation gate and up of sorted pairs from tokens `x`; without one, down of sorted pairs from a
    descriptor `x` of their tiles, to where they were before the sort.
    """
    kind: tl.constexpr = out.dtype.element_ty
    stripes = tl.cdiv(size_out, ROWS)
    tile, first_n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS
    follow(OVERLAP)
    if tile >= tl.load(work):
        return
    expert = tl.load(work + 4 + 4 * tile)
    start, end = tl.load(work + 5 + 4 * tile), tl.load(work + 6 + 4 * tile)
    m, n = start + tl.arange(0, NUM), first_n + tl.arange(0, ROWS)
    pair, exist = tl.load(order + m, mask=m < end, other=0).to(tl.int64), n < size_out
    row = expert * (2 * size_out if ACTIVATION != "" else size_out) + first_n
    heads += (expert * groups).to(tl.int64) * head_stride
    sizes = (start, first_n, row, size_in, size_out, x_stride, head_stride)
    of = x, weight, heads, pair // TOP
    acc, up = _sums(of, sizes, kind, ACTIVATION != "", BITS, GROUP, NUM, ROWS, RUN, LENGTH)
    if BIASED:
        acc += tl.load(bias + row + n - first_n, mask=exist, other=0.0).to(tl.float32)[:, None]
    y = acc.to(kind)
    if ACTIVATION != "":
        if BIASED:
            up += tl.load(bias + row + size_out + n - first_n, mask=exist, other=0.0).to(tl.float32)[:, None]
        y = gate_times(y, up.to(kind), ACTIVATION)
        pair = m.to(tl.int64)
    tl.store(out + pair[None, :] * size_out + n[:, None], y, mask=(m < end)[None, :] & exist[:, None])


def mix(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: GroupedWeight,
    down: GroupedWeight,
    biases: tuple[Tensor | None, Tensor | None],
    activation: str,
) -> Tensor:
    """[T, hidden] -> [T, hidden]: the weighted sum of what the chosen experts make of each token."""
    if not len(x):
        return torch.empty_like(x)
    sizes, top = (len(down.heads), down.size_in), ids.shape[1]
    tile = plan_of(ids.numel() / len(down.heads))
    by_tile = functools.partial(multiply, tile=tile, top=top)
    first = functools.partial(by_tile, weight=gate_up, bias=biases[0], activation=activation)
    last = functools.partial(by_tile, weight=down, bias=biases[1])
    return sorted_mix(x, ids, weights, first, last, sizes=sizes, height=tile.num)


def multiply(
    out: Tensor,
    x: Tensor,
    pairs: Sorted,
    *,
    weight: GroupedWeight,
    bias: Tensor | None,
    tile: Tile,
    top: int,
    activation: str = "",
    ahead: bool,
) -> None:
    """With an activation gate and up of tokens, without one down of sorted pairs."""
    codes, heads, bits, group, run, size_in = weight
    (num, size_out), length = out.shape, min(tile.length, run)
    rows: Tensor | TensorDescriptor = x if activation else tiled(x, tile.num, length)
    launch(_tiles, most_tiles(num, len(heads), tile.num) * triton.cdiv(size_out, tile.rows))(
        out, rows, tiled(codes, tile.rows, length), heads, out if bias is None else bias, *pairs, size_in,
        size_out, x.stride(0), heads.stride(1), heads.shape[1], TOP=top, ACTIVATION=activation,
        BIASED=bias is not None, BITS=bits, GROUP=group, NUM=tile.num, ROWS=tile.rows, RUN=run,
        LENGTH=length, OVERLAP=ahead, launch_pdl=ahead, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def plan_of(mean: float) -> Tile:
    """For experts with so many pairs in the mean."""
    height = 16 if mean <= 10 else 32 if mean <= 24 else 64
    return Tile(height, 64, 64 if height < 64 else 32, 2 if height < 64 else 4, 3)
