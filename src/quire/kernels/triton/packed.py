"""Products with packed weights (`planes.py`), x W^T; codes become numbers in registers.

`_rows` has a unit of some rows in each thread, for one row of x. `_tiles` makes tiles of a weight for the tensor
cores. With many rows of x a weight is unpacked into scratch, a share at a time, and the library multiplies.

The bits of a code are put behind the exponent of a float: 1 + code / 2^bits needs no conversion, and what is
too much is a multiple of the sum of x.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.matmul import arrivals_of
from quire.kernels.triton.planes import KINDS, TILE, Planes

_SCRATCH_WEIGHTS = 1 << 26
"""That are unpacked at a time."""
_UNPACKED_ROWS, _UNPACKED_COLUMNS = 16, 256
"""Of a program that unpacks."""
_EIGHT = tl.constexpr(8)
"""Numbers of x that a thread reads at once."""
_TILE = tl.constexpr(TILE)


class Form(NamedTuple):
    """What a kernel is compiled for: `planes.Kind`."""

    low: int
    high: int
    unit: int
    words: int
    zero: int
    lows: bool
    subs: str
    booked: bool
    reach: int
    """Codes of a word that one shift brings into a mantissa, each `low` bits deeper than the next."""


class Bits(NamedTuple):
    """The tensors of `planes.Planes`."""

    low: Any
    high: Any
    subs: Any
    scales: Any
    book: Any


class Rows(NamedTuple):
    """`_rows` with one or two tiles of rows of the weight per program."""

    two: bool
    warps: int


class Tiles(NamedTuple):
    """`_tiles` with so many rows of x, rows of the weight and columns at a time, in `splits`."""

    num: int
    rows: int
    length: int
    splits: int
    warps: int
    stages: int


Plan = Rows | Tiles | None
"""None unpacks."""


@triton.jit
def _words(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """Low bits of units u [U] of rows n [R]: [R, U, words]."""
    j = tl.arange(0, FORM.words)[None, None, :]
    if FORM.words == 1:
        at = n.to(tl.int64)[:, None, None] // _TILE * (units * _TILE) + n[:, None, None] % _TILE
        at += u[None, :, None] * _TILE + j
    else:
        at = n.to(tl.int64)[:, None, None] * (units * FORM.words) + u[None, :, None] * FORM.words + j
    return tl.load(bits.low + at, mask=exist[:, :, None], other=0, eviction_policy="evict_first")


@triton.jit
def _high(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """The same of high bits, those of a word at the right end."""
    if FORM.high == 0:
        return tl.zeros([1, 1, 1], tl.int32)
    else:
        at = n.to(tl.int64)[:, None] // _TILE * (units * _TILE) + u[None, :] * _TILE + n[:, None] % _TILE
        all = tl.load(bits.high + at, mask=exist, other=0, eviction_policy="evict_first")
        shift = tl.arange(0, FORM.words) * (32 // FORM.low * FORM.high)
        return all.to(tl.int32)[:, :, None] >> shift[None, None, :]


@triton.jit
def _scales(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Scales and lows [R, U] of units u of rows n."""
    EACH: tl.constexpr = 2 if FORM.lows else 1
    WIDTH: tl.constexpr = (256 if FORM.subs != "" else 32) // FORM.unit
    tile, r = n.to(tl.int64)[:, None] // _TILE, n[:, None] % _TILE
    at = bits.scales + (tile * (units // WIDTH) + u[None, :] // WIDTH) * (EACH * _TILE) + r
    scale = tl.load(at, mask=exist, other=0.0).to(tl.float32)
    low = scale
    if FORM.lows:
        low = tl.load(at + _TILE, mask=exist, other=0.0).to(tl.float32)
    if FORM.subs == "nibbles":
        sub = tl.load(bits.subs + (tile * units + u[None, :]) * _TILE + r, mask=exist, other=0).to(tl.int32)
        return scale * (sub & 15).to(tl.float32), low * (sub >> 4 & 15).to(tl.float32)
    elif FORM.subs == "bytes":
        at_sub = bits.subs + (tile * units + u[None, :]) * (EACH * _TILE) + r
        scale *= tl.load(at_sub, mask=exist, other=0).to(tl.float32)
        if FORM.lows:
            low *= tl.load(at_sub + _TILE, mask=exist, other=0).to(tl.float32)
        return scale, low
    else:
        return scale, low


@triton.jit
def _shift(bits: tl.tensor, RIGHT: tl.constexpr) -> tl.tensor:
    if RIGHT >= 0:
        return bits >> RIGHT
    else:
        return bits << (-RIGHT)


@triton.jit
def _number(
    words: tl.tensor, high: tl.tensor, book: tl.tensor, S: tl.constexpr, FORM: tl.constexpr
) -> tl.tensor:
    """Code S of each word / 2^bits, and 2^depth too much; or what the book has for it.

    The powers of two come out of the book: as constants they would cost an instruction more.
    """
    MASK: tl.constexpr = (1 << FORM.low) - 1
    if FORM.booked:
        return tl.load(book + (words >> (FORM.low * S) & MASK))
    else:
        DEPTH: tl.constexpr = FORM.low * (FORM.reach - 1 - S % FORM.reach)
        FIRST: tl.constexpr = 23 - FORM.high - FORM.low - DEPTH
        power = tl.load(book + DEPTH // FORM.low).to(tl.int32, bitcast=True)
        code = _shift(words, FORM.low * S - FIRST) & (MASK << FIRST) | power
        if FORM.high > 0:
            TOP: tl.constexpr = FIRST + FORM.low
            code ^= _shift(high, FORM.high * S - TOP) & (((1 << FORM.high) - 1) << TOP)
        return code.to(tl.float32, bitcast=True)


@triton.jit
def _times_one(
    sums: tl.tensor,
    much: tl.tensor,
    words: tl.tensor,
    high: tl.tensor,
    book: tl.tensor,
    x: tl.tensor,
    S: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`sums` [R, U, words] and the products of code S of each word with x [U, words]; `much` [U, words] and what
    they have too much."""
    sums += _number(words, high, book, S, FORM) * x[None]
    if not FORM.booked:
        much += x * (1 << FORM.low * (FORM.reach - 1 - S % FORM.reach))
    return sums, much


@triton.jit
def _times_eight(
    sums: tl.tensor,
    much: tl.tensor,
    words: tl.tensor,
    high: tl.tensor,
    book: tl.tensor,
    x: tl.tensor,
    Q: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The same with numbers 8 Q.. of units of x, [U, 8]."""
    U: tl.constexpr = x.shape[0]
    S: tl.constexpr = Q * (8 // FORM.words)
    if FORM.words == 4:
        a, b = tl.split(tl.reshape(x, [U, 4, 2]))
        sums, much = _times_one(sums, much, words, high, book, a, S, FORM)
        sums, much = _times_one(sums, much, words, high, book, b, S + 1, FORM)
    elif FORM.words == 2:
        even, odd = tl.split(tl.reshape(x, [U, 2, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        sums, much = _times_one(sums, much, words, high, book, a, S, FORM)
        sums, much = _times_one(sums, much, words, high, book, b, S + 1, FORM)
        sums, much = _times_one(sums, much, words, high, book, c, S + 2, FORM)
        sums, much = _times_one(sums, much, words, high, book, d, S + 3, FORM)
    else:
        even, odd = tl.split(tl.reshape(x, [U, 1, 2, 2, 2]))
        for i in tl.static_range(2):
            left, right = tl.split(even if i == 0 else odd)
            a, c = tl.split(left)
            b, d = tl.split(right)
            sums, much = _times_one(sums, much, words, high, book, a, S + i, FORM)
            sums, much = _times_one(sums, much, words, high, book, b, S + i + 2, FORM)
            sums, much = _times_one(sums, much, words, high, book, c, S + i + 4, FORM)
            sums, much = _times_one(sums, much, words, high, book, d, S + i + 6, FORM)
    return sums, much


@triton.jit
def _sum(
    acc: tl.tensor,
    bits: tl.tuple,
    words: tl.tensor,
    n: tl.tensor,
    inside: tl.tensor,
    x: tl.tensor,
    u: tl.tensor,
    units: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """`acc` [R, U] and the products of rows n with units u of x."""
    exist = inside[:, None] & (u < units)[None, :]
    high = _high(bits, n, u, exist, units, FORM)
    scale, low = _scales(bits, n, u, exist, units, FORM)
    sums, total = tl.zeros(words.shape, tl.float32), tl.zeros(u.shape, tl.float32)
    much = tl.zeros([words.shape[1], FORM.words], tl.float32)
    place = x + u[:, None] * FORM.unit + tl.arange(0, _EIGHT)[None, :]
    for q in tl.static_range(FORM.unit // _EIGHT):
        some = tl.load(place + q * _EIGHT, mask=(u < units)[:, None], other=0.0).to(tl.float32)
        total += tl.sum(some, 1)
        sums, much = _times_eight(sums, much, words, high, bits.book, some, q, FORM)
    dot = tl.sum(sums, 2)
    if not FORM.booked:
        MOST: tl.constexpr = 1 << FORM.low + FORM.high
        dot = (dot - tl.sum(much, 1)[None, :]) * MOST - total[None, :] * FORM.zero
    acc += scale * dot
    if FORM.lows:
        acc -= low * total[None, :]
    return acc


@triton.jit
def _rows(
    out: tl.tensor,
    x: tl.tensor,
    bits: tl.tuple,
    bias: tl.tensor,
    ids: tl.tensor,
    columns: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    FORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    TOP: tl.constexpr,
    TWO: tl.constexpr,
    UNITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (size_out / rows, rows of out): one or TWO tiles of rows, `UNITS` at a time.

    With an activation the second tile is the up one's. If TOP > 0 a row of out is a pair's: its expert is in
    `ids`, its token is pair / TOP.
    """
    pair, units, u = tl.program_id(1), columns // FORM.unit, tl.arange(0, UNITS)
    GATED: tl.constexpr = ACTIVATION != ""
    n = tl.program_id(0) * (_TILE * (2 if TWO and not GATED else 1)) + tl.arange(0, _TILE)
    apart = size_out if GATED else _TILE
    inside, also = n < size_out, n < (size_out if GATED else size_out - _TILE)
    start = 0
    if TOP > 0:
        follow(OVERLAP)
        start = tl.load(ids + pair) * (size_out * (2 if GATED else 1))
        x += (pair // TOP).to(tl.int64) * x_stride
    else:
        x += pair.to(tl.int64) * x_stride
    row = start + n
    acc, other = tl.zeros([_TILE, UNITS], tl.float32), tl.zeros([_TILE, UNITS], tl.float32)
    words = _words(bits, row, u, inside[:, None] & (u < units)[None, :], units, FORM)
    if TWO:
        more = _words(bits, row + apart, u, also[:, None] & (u < units)[None, :], units, FORM)
    if TOP == 0:
        follow(OVERLAP)
    acc = _sum(acc, bits, words, row, inside, x, u, units, FORM)
    if TWO:
        other = _sum(other, bits, more, row + apart, also, x, u, units, FORM)
    for first in range(UNITS, units, UNITS):
        at = first + u
        words = _words(bits, row, at, inside[:, None] & (at < units)[None, :], units, FORM)
        if TWO:
            more = _words(bits, row + apart, at, also[:, None] & (at < units)[None, :], units, FORM)
        acc = _sum(acc, bits, words, row, inside, x, at, units, FORM)
        if TWO:
            other = _sum(other, bits, more, row + apart, also, x, at, units, FORM)
    y, z = tl.sum(acc, 1), tl.sum(other, 1)
    kind = out.dtype.element_ty
    if BIASED:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            z += tl.load(bias + row + apart, mask=also, other=0.0).to(tl.float32)
    out += pair.to(tl.int64) * out_stride
    if GATED:
        y = gate_times(y.to(kind), z.to(kind), ACTIVATION).to(tl.float32)
    elif TWO:
        tl.store(out + n + _TILE, z.to(kind), mask=also)
    tl.store(out + n, y.to(kind), mask=inside)


@triton.jit
def _value(
    words: tl.tensor,
    high: tl.tensor,
    book: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    S: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    number = _number(words, high, book, S, FORM)
    if FORM.booked:
        return number * scale
    else:
        return number * scale - (low + scale * (1 << FORM.low * (FORM.reach - 1 - S % FORM.reach)))


@triton.jit
def _eight(
    words: tl.tensor,
    high: tl.tensor,
    book: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    Q: tl.constexpr,
    FORM: tl.constexpr,
    kind: tl.constexpr,
) -> tl.tensor:
    """Numbers 8 Q.. of units: [R, U * 8]."""
    R: tl.constexpr = words.shape[0]
    U: tl.constexpr = words.shape[1]
    S: tl.constexpr = Q * (8 // FORM.words)
    if FORM.words == 4:
        a = _value(words, high, book, scale, low, S, FORM).to(kind)
        b = _value(words, high, book, scale, low, S + 1, FORM).to(kind)
        all = tl.join(a, b)
    elif FORM.words == 2:
        a = _value(words, high, book, scale, low, S, FORM).to(kind)
        b = _value(words, high, book, scale, low, S + 1, FORM).to(kind)
        c = _value(words, high, book, scale, low, S + 2, FORM).to(kind)
        d = _value(words, high, book, scale, low, S + 3, FORM).to(kind)
        all = tl.join(tl.join(a, c), tl.join(b, d))
    else:
        a = _value(words, high, book, scale, low, S, FORM).to(kind)
        b = _value(words, high, book, scale, low, S + 1, FORM).to(kind)
        c = _value(words, high, book, scale, low, S + 2, FORM).to(kind)
        d = _value(words, high, book, scale, low, S + 3, FORM).to(kind)
        e = _value(words, high, book, scale, low, S + 4, FORM).to(kind)
        f = _value(words, high, book, scale, low, S + 5, FORM).to(kind)
        g = _value(words, high, book, scale, low, S + 6, FORM).to(kind)
        h = _value(words, high, book, scale, low, S + 7, FORM).to(kind)
        left = tl.join(tl.join(a, e), tl.join(c, g))
        right = tl.join(tl.join(b, f), tl.join(d, h))
        all = tl.join(left, right)
    return tl.reshape(all, [R, U * _EIGHT])


@triton.jit
def _held(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Words and high bits of units u of rows n, and what `_value` multiplies with and takes away."""
    words, high = _words(bits, n, u, exist, units, FORM), _high(bits, n, u, exist, units, FORM)
    scale, low = _scales(bits, n, u, exist, units, FORM)
    if not FORM.booked:
        MOST: tl.constexpr = 1 << FORM.low + FORM.high
        if not FORM.lows:
            low = scale * FORM.zero
        scale *= MOST
    return words, high, scale[:, :, None], low[:, :, None]


@triton.jit
def _unpack(
    out: tl.tensor,
    bits: tl.tuple,
    ids: tl.tensor,
    first_row: tl.tensor,
    num: tl.tensor,
    columns: tl.tensor,
    FORM: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (num / ROWS, units / UNITS): rows from `first_row` on, or if CHOSEN those that `ids` has."""
    i, u = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    follow(OVERLAP)
    if CHOSEN:
        n = tl.load(ids + i, mask=i < num, other=0)
    else:
        n = first_row + i
    units = columns // FORM.unit
    exist = (i < num)[:, None] & (u < units)[None, :]
    words, high, scale, low = _held(bits, n, u, exist, units, FORM)
    k = tl.arange(0, UNITS * _EIGHT)
    at = (tl.program_id(1) * UNITS + k // _EIGHT) * FORM.unit + k % _EIGHT
    for q in tl.static_range(FORM.unit // _EIGHT):
        some = _eight(words, high, bits.book, scale, low, q, FORM, out.dtype.element_ty)
        place = out + i.to(tl.int64)[:, None] * columns + (at + q * _EIGHT)[None, :]
        tl.store(place, some, mask=(i < num)[:, None] & (at < columns)[None, :])


@triton.jit(do_not_specialize=["num"])
def _tiles(
    out: tl.tensor,
    x: tl.tensor,
    bits: tl.tuple,
    bias: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    num: tl.tensor,
    columns: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    FORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (num / NUM * size_out / ROWS, SPLITS); see `_tiles` of matmul.py."""
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    m, n = tile % stripes * NUM + tl.arange(0, NUM), tile // stripes * ROWS + tl.arange(0, ROWS)
    units = columns // FORM.unit
    kind = x.dtype.element_ty
    share = tl.cdiv(tl.cdiv(units, UNITS), SPLITS) * UNITS
    first, k = tl.program_id(1) * share, tl.arange(0, UNITS * _EIGHT)
    at_x = x + tl.minimum(m, num - 1).to(tl.int64)[:, None] * x_stride + (k // _EIGHT * FORM.unit + k % _EIGHT)[None, :]
    follow(OVERLAP)
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for at in range(first, tl.minimum(first + share, units), UNITS):
        u = at + tl.arange(0, UNITS)
        exist = (n < size_out)[:, None] & (u < units)[None, :]
        words, high, scale, low = _held(bits, n, u, exist, units, FORM)
        if ACTIVATION != "":
            words2, high2, scale2, low2 = _held(bits, n + size_out, u, exist, units, FORM)
        for q in tl.static_range(FORM.unit // _EIGHT):
            a = tl.load(at_x + (at * FORM.unit + q * _EIGHT), mask=(at + k // _EIGHT < units)[None, :], other=0.0)
            a = tl.trans(a)
            w = _eight(words, high, bits.book, scale, low, q, FORM, kind)
            acc = tl.dot(w, a, acc, input_precision="ieee")
            if ACTIVATION != "":
                w = _eight(words2, high2, bits.book, scale2, low2, q, FORM, kind)
                up = tl.dot(w, a, up, input_precision="ieee")
    acc, up = tl.trans(acc), tl.trans(up)
    inside = (m < num)[:, None] & (n < size_out)[None, :]
    if SPLITS > 1:
        place = m[:, None] * size_out + n[None, :]
        tl.store(parts + tl.program_id(1) * num * size_out + place, acc, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1) < SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = tl.zeros([NUM, ROWS], tl.float32)
        for split in tl.static_range(SPLITS):
            acc += tl.load(
                parts + split * num * size_out + place, mask=inside, other=0.0, cache_modifier=".cg"
            )
    if BIASED:
        acc += tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out.dtype.element_ty)
    if ACTIVATION != "":
        y = gate_times(y, up.to(out.dtype.element_ty), ACTIVATION)
    tl.store(out + m.to(tl.int64)[:, None] * out_stride + n[None, :], y, mask=inside)


def product(x: Tensor, planes: Planes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x W^T + b for x [M, K]; `out` may be some columns of a wider tensor."""
    if out is None:
        out = torch.empty(len(x), planes.rows, dtype=x.dtype, device=x.device)
    plan = choose(len(x), planes, 1)
    if plan is None:
        return _unpacked_product(out, x, planes, bias)
    return multiply(x, planes, bias, plan, out=out)


def gated(x: Tensor, planes: Planes, activation: str = "silu") -> Tensor:
    """act(x G^T) * (x U^T) for W = G over U, of which each has whole tiles."""
    plan = choose(len(x), planes, 2)
    return gated_of(product(x, planes), activation) if plan is None else multiply(x, planes, None, plan, activation)


def multiply(
    x: Tensor,
    planes: Planes,
    bias: Tensor | None,
    plan: Rows | Tiles,
    activation: str = "",
    out: Tensor | None = None,
) -> Tensor:
    num, size_out, size_in = len(x), planes.rows // (2 if activation else 1), planes.columns
    if out is None:
        out = torch.empty(num, size_out, dtype=x.dtype, device=x.device)
    form, ahead = form_of(planes), overlap(num, min(size_in, size_out))
    shared: dict[str, Any] = {"FORM": form, "ACTIVATION": activation, "BIASED": bias is not None}
    shared |= {"OVERLAP": ahead, "launch_pdl": ahead, "num_warps": plan.warps}
    given = out if bias is None else bias
    if isinstance(plan, Rows):
        per_program = TILE * (2 if plan.two and not activation else 1)
        launch(_rows, triton.cdiv(size_out, per_program), num)(
            out, x, bits_of(planes), given, out, size_in, size_out, x.stride(0), out.stride(0), TOP=0,
            TWO=plan.two or activation != "", UNITS=32 * plan.warps, **shared,
        )  # fmt: skip
        return out
    parts = out
    if plan.splits > 1:
        parts = torch.empty(plan.splits * num * size_out, dtype=torch.float32, device=x.device)
    launch(_tiles, triton.cdiv(num, plan.num) * triton.cdiv(size_out, plan.rows), plan.splits)(
        out, x, bits_of(planes), given, parts, arrivals_of(x.device), num, size_in, size_out, x.stride(0),
        out.stride(0), NUM=plan.num, ROWS=plan.rows, UNITS=plan.length // form.unit, SPLITS=plan.splits,
        num_stages=plan.stages, **shared,
    )  # fmt: skip
    return out


def rows(ids: Tensor, planes: Planes, dtype: torch.dtype) -> Tensor:
    """[T] ids -> [T, columns]."""
    out = torch.empty(len(ids), planes.columns, dtype=dtype, device=ids.device)
    if len(ids):
        _launch_unpack(out, planes, ids, 0, height=1)
    return out


def unpack(planes: Planes, dtype: torch.dtype, first: int = 0, num: int | None = None) -> Tensor:
    """`num` rows from `first` on."""
    num = planes.rows - first if num is None else num
    out = torch.empty(num, planes.columns, dtype=dtype, device=planes.data.device)
    _launch_unpack(out, planes, None, first, height=_UNPACKED_ROWS)
    return out


def _launch_unpack(out: Tensor, planes: Planes, ids: Tensor | None, first: int, *, height: int) -> None:
    form, num = form_of(planes), len(out)
    units = planes.columns // form.unit
    most = _UNPACKED_COLUMNS // form.unit
    ahead = ids is not None and overlap(num)
    launch(_unpack, triton.cdiv(num, height), triton.cdiv(units, most))(
        out, bits_of(planes), out if ids is None else ids, first, num, planes.columns, FORM=form,
        CHOSEN=ids is not None, ROWS=height, UNITS=most, OVERLAP=ahead, launch_pdl=ahead, num_warps=4,
    )  # fmt: skip


def _unpacked_product(out: Tensor, x: Tensor, planes: Planes, bias: Tensor | None) -> Tensor:
    step = max(_SCRATCH_WEIGHTS // planes.columns // TILE, 1) * TILE
    for first in range(0, planes.rows, step):
        num = min(step, planes.rows - first)
        weight, own = unpack(planes, x.dtype, first, num), out[:, first : first + num]
        if bias is None:
            torch.mm(x, weight.t(), out=own)
        else:
            torch.addmm(bias[first : first + num].to(x.dtype), x, weight.t(), out=own)
    return out


def form_of(planes: Planes) -> Form:
    kind = KINDS[planes.kind]
    return Form(
        kind.low, kind.high, kind.unit, kind.words, kind.zero, kind.lows, kind.subs, bool(kind.book),
        {2: 4, 4: 3, 8: 2}[kind.low],
    )  # fmt: skip


def bits_of(planes: Planes) -> Bits:
    return Bits(planes.low, planes.high, planes.subs, planes.scales, planes.book)


def choose(num: int, planes: Planes, parts: int) -> Plan:
    """How to multiply `num` rows of x; `parts` is 2 for gate and up."""
    if num == 0:
        return None
    if num == 1:
        return Rows(False, 4)
    if num <= 16:
        return Tiles(16, 64, 128, 1, 4, 3)
    if num <= 64:
        return Tiles(32 if num <= 32 else 64, 64, 128, 1, 4, 3)
    return None
