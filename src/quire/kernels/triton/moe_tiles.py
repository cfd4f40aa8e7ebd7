"""Tiles of pairs with one expert, multiplied with its weights on the tensor cores."""

import triton
import triton.language as tl

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.fp8 import along_x, plus
from quire.kernels.triton.launch import follow
from quire.kernels.triton.lora_few import plus_added
from quire.kernels.triton.tile_dots import empty, times, upright


@triton.jit(do_not_specialize=["num"])
def tiles(
    out: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    work: tl.tensor,
    num: tl.tensor,
    size_in: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    added: tl.tensor,
    slots: tl.tensor,
    TOP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCKED: tl.constexpr,
    EVEN: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (most tiles * size_out / ROWS). `weight` is a descriptor of tiles; x has `num` rows. With an
    activation gate and up of sorted pairs from tokens `x`; without one, down of sorted pairs from a
    descriptor `x` of their tiles, to where they were before the sort."""
    stripes = tl.cdiv(size_out, ROWS)
    tile, first_n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS
    follow(OVERLAP)
    if tile >= tl.load(work):
        return
    work += 4 + 4 * tile
    expert, start, end = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    m, n = start + tl.arange(0, NUM), first_n + tl.arange(0, ROWS)
    pair = tl.load(order + m, mask=m < end, other=0).to(tl.int64)
    acc, up = empty(NUM, ROWS), empty(NUM, ROWS)
    if ACTIVATION != "":
        row, own, k = expert * 2 * size_out + first_n, pair // TOP, tl.arange(0, LENGTH)
        block, other = _blocks(expert, first_n, size_out)
        at_x = x + (own * x_stride)[:, None] + k[None, :]
        for at in range(0, size_in, LENGTH):
            a = _stretch(at_x + at, k < size_in - at, EVEN)
            acc = _plus(acc, a, weight, row, at, block, scale, x_scale, own, num, size_in, BLOCKED)
            up = _plus(up, a, weight, row + size_out, at, other, scale, x_scale, own, num, size_in, BLOCKED)
    else:
        row, own = expert * size_out + first_n, tl.minimum(m, end - 1)
        block = expert * tl.cdiv(size_out, 128) + first_n // 128
        for at in range(0, size_in, LENGTH):
            a = x.load([start, at])
            acc = _plus(acc, a, weight, row, at, block, scale, x_scale, own, num, size_in, BLOCKED)
    row += tl.arange(0, ROWS)
    acc = _scaled(acc, scale, x_scale, row, n < size_out, own, NUM, BLOCKED)
    if ACTIVATION != "":
        up = _scaled(up, scale, x_scale, row + size_out, n < size_out, own, NUM, BLOCKED)
    inside = (m < end)[:, None] & (n < size_out)[None, :]
    y = _ended(acc, up, bias + row, m, n, pair, inside, size_out, out, added, slots, NUM, ACTIVATION, BIASED)
    to = m.to(tl.int64) if ACTIVATION != "" else pair
    tl.store(out + to[:, None] * size_out + n[None, :], y, mask=inside)


@triton.jit
def _ended(
    acc: tl.tensor,
    up: tl.tensor,
    bias: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    pair: tl.tensor,
    inside: tl.tensor,
    size_out: tl.tensor,
    out: tl.tensor,
    added: tl.tensor,
    slots: tl.tensor,
    NUM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
) -> tl.tensor:
    """What `tiles` writes. Adapters of gate and up add to pairs, those of down to sorted ones."""
    of = pair if ACTIVATION != "" else m.to(tl.int64)
    more = of[:, None] * (2 * size_out if ACTIVATION != "" else size_out) + n[None, :]
    y = _with(acc, bias, n < size_out, out, added, slots, of, more, inside, NUM, BIASED)
    if ACTIVATION != "":
        bias += size_out
        up = _with(up, bias, n < size_out, out, added, slots, of, more + size_out, inside, NUM, BIASED)
        y = gate_times(y, up, ACTIVATION)
    return y


@triton.jit
def _plus(
    acc: tl.tensor,
    a: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    block: tl.tensor,
    scale: tl.tensor,
    x_scale: tl.tensor,
    own: tl.tensor,
    num: tl.tensor,
    size_in: tl.tensor,
    BLOCKED: tl.constexpr,
) -> tl.tensor:
    """With the product of a stretch; `block` is the row of its scale, `own` are those of `x_scale`."""
    w = weight.load([row, at])
    if BLOCKED:
        of_x = along_x(tl.load(x_scale + at // 128 * num + own), a.shape[0])
        return plus(acc, a, w, of_x, scale + block * tl.cdiv(size_in, 128) + at // 128, BLOCKED)
    else:
        return times(a, w, acc)


@triton.jit
def _scaled(
    acc: tl.tensor,
    scale: tl.tensor,
    x_scale: tl.tensor,
    row: tl.tensor,
    exist: tl.tensor,
    own: tl.tensor,
    NUM: tl.constexpr,
    BLOCKED: tl.constexpr,
) -> tl.tensor:
    if scale is not None and not BLOCKED:
        factor = tl.load(scale + row, mask=exist, other=0.0)
        acc *= factor[:, None] if NUM < 64 else factor[None, :]
        acc *= along_x(tl.load(x_scale + own), NUM)
    return acc


@triton.jit
def _with(
    acc: tl.tensor,
    bias: tl.tensor,
    exist: tl.tensor,
    like: tl.tensor,
    added: tl.tensor,
    slots: tl.tensor,
    of: tl.tensor,
    more: tl.tensor,
    inside: tl.tensor,
    NUM: tl.constexpr,
    BIASED: tl.constexpr,
) -> tl.tensor:
    """Upright, with the bias and with what is added to the pairs `of`, at `more`."""
    if BIASED:
        offset = tl.load(bias, mask=exist, other=0.0).to(tl.float32)
        acc += offset[:, None] if NUM < 64 else offset[None, :]
    if added is None:
        return upright(acc.to(like.dtype.element_ty), NUM)
    else:
        return plus_added(upright(acc, NUM), added, slots, of, more, inside).to(like.dtype.element_ty)


@triton.jit
def _blocks(expert: tl.tensor, first_n: tl.tensor, size_out: tl.tensor) -> tl.tensor:
    """Rows of an expert's scales: those of its gate and of its up part."""
    block = expert * tl.cdiv(2 * size_out, 128) + first_n // 128
    return block, block + size_out // 128


@triton.jit
def _stretch(at: tl.tensor, exist: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Of rows of x; `EVEN`: all of it exists."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=exist[None, :], other=0.0)
