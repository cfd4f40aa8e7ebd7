"""Products with packed weights (`planes.py`), x W^T; codes become numbers in registers.

`rows` has a unit of some rows in each thread, for one row of x. `tiles` makes tiles of a weight for the
tensor cores. With many rows of x a weight is unpacked, a share at a time, and the library multiplies.

The bits of a code are put behind the exponent of a float: 1 + code / 2^bits needs no conversion, and what is
too much is a multiple of the sum of x.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.launch import follow
from quire.kernels.triton.planes import TILE

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
    book: str
    reach: int
    """Codes of a word that one shift brings into a mantissa, each `low` bits deeper than the next."""


class Bits(NamedTuple):
    """The tensors of `planes.Planes`."""

    low: Any
    high: Any
    subs: Any
    scales: Any
    powers: Any


@triton.jit
def _words(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """Low bits of units u [U] of rows n [R]: [R, U, words]."""
    WORDS: tl.constexpr = FORM.words
    j = tl.arange(0, WORDS)[None, None, :]
    if WORDS == 1:
        at = n.to(tl.int64)[:, None, None] // _TILE * (units * _TILE) + n[:, None, None] % _TILE
        at += u[None, :, None] * _TILE + j
    else:
        at = n.to(tl.int64)[:, None, None] * (units * WORDS) + u[None, :, None] * WORDS + j
        # Units are not beside each other, but so neighbouring threads get neighbouring ones, and not rows.
        at = tl.max_contiguous(at, [1, 2, WORDS])
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
    words: tl.tensor, high: tl.tensor, powers: tl.tensor, S: tl.constexpr, FORM: tl.constexpr
) -> tl.tensor:
    """Code S of each word / 2^bits, and 2^depth too much; of `book` codes, what they stand for.

    The powers of two are loaded: as constants they would cost an instruction more.
    """
    DEPTH: tl.constexpr = FORM.low * (FORM.reach - 1 - S % FORM.reach)
    FIRST: tl.constexpr = 23 - FORM.high - FORM.low - DEPTH
    if FORM.book == "e2m1":
        tiny = _shift(words, 4 * S - 22) & (7 << 22) | _shift(words, 4 * S - 28) & -(1 << 31)
        return tiny.to(tl.float32, bitcast=True) * 2.0**126
    else:
        power = tl.load(powers + DEPTH // FORM.low).to(tl.int32, bitcast=True)
        code = _shift(words, FORM.low * S - FIRST) & (((1 << FORM.low) - 1) << FIRST) | power
        if FORM.high > 0:
            TOP: tl.constexpr = FIRST + FORM.low
            code ^= _shift(high, FORM.high * S - TOP) & (((1 << FORM.high) - 1) << TOP)
        number = code.to(tl.float32, bitcast=True)
        if FORM.book == "iq4":  # what is nearest to this curve; the last two steps round it
            t = number - (1 << DEPTH)
            curve = (((103.94 * t + 127.33) * t - 351.21) * t + 386.78) * t - 126.57
            return (curve + 12582912.0) - 12582912.0
        else:
            return number


@triton.jit
def _times_one(
    sums: tl.tensor,
    much: tl.tensor,
    words: tl.tensor,
    high: tl.tensor,
    powers: tl.tensor,
    x: tl.tensor,
    S: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`sums` [R, U, words] and the products of code S of each word with x [U, words]; `much` [U, words] and
    what they have too much."""
    sums += _number(words, high, powers, S, FORM) * x[None]
    if FORM.book == "":
        much += x * (1 << FORM.low * (FORM.reach - 1 - S % FORM.reach))
    return sums, much


@triton.jit
def _times_eight(
    sums: tl.tensor,
    much: tl.tensor,
    words: tl.tensor,
    high: tl.tensor,
    powers: tl.tensor,
    x: tl.tensor,
    Q: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The same with numbers 8 Q.. of units of x, [U, 8]."""
    U: tl.constexpr = x.shape[0]
    S: tl.constexpr = Q * (8 // FORM.words)
    if FORM.words == 4:
        a, b = tl.split(tl.reshape(x, [U, 4, 2]))
        sums, much = _times_one(sums, much, words, high, powers, a, S, FORM)
        sums, much = _times_one(sums, much, words, high, powers, b, S + 1, FORM)
    elif FORM.words == 2:
        even, odd = tl.split(tl.reshape(x, [U, 2, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        sums, much = _times_one(sums, much, words, high, powers, a, S, FORM)
        sums, much = _times_one(sums, much, words, high, powers, b, S + 1, FORM)
        sums, much = _times_one(sums, much, words, high, powers, c, S + 2, FORM)
        sums, much = _times_one(sums, much, words, high, powers, d, S + 3, FORM)
    else:
        even, odd = tl.split(tl.reshape(x, [U, 1, 2, 2, 2]))
        for i in tl.static_range(2):
            left, right = tl.split(even if i == 0 else odd)
            a, c = tl.split(left)
            b, d = tl.split(right)
            sums, much = _times_one(sums, much, words, high, powers, a, S + i, FORM)
            sums, much = _times_one(sums, much, words, high, powers, b, S + i + 2, FORM)
            sums, much = _times_one(sums, much, words, high, powers, c, S + i + 4, FORM)
            sums, much = _times_one(sums, much, words, high, powers, d, S + i + 6, FORM)
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
    WORDS: tl.constexpr = FORM.words
    much = tl.zeros([words.shape[1], WORDS], tl.float32)
    place = x + u[:, None] * FORM.unit + tl.arange(0, _EIGHT)[None, :]
    for q in tl.static_range(FORM.unit // _EIGHT):
        some = tl.load(place + q * _EIGHT, mask=(u < units)[:, None], other=0.0).to(tl.float32)
        total += tl.sum(some, 1)
        sums, much = _times_eight(sums, much, words, high, bits.powers, some, q, FORM)
    dot = tl.sum(sums, 2)
    if FORM.book == "":
        MOST: tl.constexpr = 1 << FORM.low + FORM.high
        dot = (dot - tl.sum(much, 1)[None, :]) * MOST - total[None, :] * FORM.zero
    acc += scale * dot
    if FORM.lows:
        acc -= low * total[None, :]
    return acc


@triton.jit
def rows(
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
    powers: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    S: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    number = _number(words, high, powers, S, FORM)
    if FORM.book != "":
        return number * scale
    else:
        return number * scale - (low + scale * (1 << FORM.low * (FORM.reach - 1 - S % FORM.reach)))


@triton.jit
def _eight(
    words: tl.tensor,
    high: tl.tensor,
    powers: tl.tensor,
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
        a = _value(words, high, powers, scale, low, S, FORM).to(kind)
        b = _value(words, high, powers, scale, low, S + 1, FORM).to(kind)
        all = tl.join(a, b)
    elif FORM.words == 2:
        a = _value(words, high, powers, scale, low, S, FORM).to(kind)
        b = _value(words, high, powers, scale, low, S + 1, FORM).to(kind)
        c = _value(words, high, powers, scale, low, S + 2, FORM).to(kind)
        d = _value(words, high, powers, scale, low, S + 3, FORM).to(kind)
        all = tl.join(tl.join(a, c), tl.join(b, d))
    else:
        a = _value(words, high, powers, scale, low, S, FORM).to(kind)
        b = _value(words, high, powers, scale, low, S + 1, FORM).to(kind)
        c = _value(words, high, powers, scale, low, S + 2, FORM).to(kind)
        d = _value(words, high, powers, scale, low, S + 3, FORM).to(kind)
        e = _value(words, high, powers, scale, low, S + 4, FORM).to(kind)
        f = _value(words, high, powers, scale, low, S + 5, FORM).to(kind)
        g = _value(words, high, powers, scale, low, S + 6, FORM).to(kind)
        h = _value(words, high, powers, scale, low, S + 7, FORM).to(kind)
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
    if FORM.book == "":
        MOST: tl.constexpr = 1 << FORM.low + FORM.high
        if not FORM.lows:
            low = scale * FORM.zero
        scale *= MOST
    return words, high, scale[:, :, None], low[:, :, None]


@triton.jit
def unpack(
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
    n = tl.load(ids + i, mask=i < num, other=0) if CHOSEN else first_row + i
    units = columns // FORM.unit
    exist = (i < num)[:, None] & (u < units)[None, :]
    words, high, scale, low = _held(bits, n, u, exist, units, FORM)
    k = tl.arange(0, UNITS * _EIGHT)
    at = (tl.program_id(1) * UNITS + k // _EIGHT) * FORM.unit + k % _EIGHT
    for q in tl.static_range(FORM.unit // _EIGHT):
        some = _eight(words, high, bits.powers, scale, low, q, FORM, out.dtype.element_ty)
        place = out + i.to(tl.int64)[:, None] * columns + (at + q * _EIGHT)[None, :]
        tl.store(place, some, mask=(i < num)[:, None] & (at < columns)[None, :])


@triton.jit(do_not_specialize=["num"])
def tiles(
    out: tl.tensor,
    x: tl.tensor,
    bits: tl.tuple,
    bias: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    order: tl.tensor,
    work: tl.tensor,
    num: tl.tensor,
    columns: tl.tensor,
    size_out: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    FORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    TOP: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (num / NUM * size_out / ROWS, SPLITS); see `_tiles` of matmul.py. With an activation the rows of
    up are behind those of the gate.

    If TOP > 0 rows of out are pairs, sorted by `sort` of experts.py, of tokens pair / TOP.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    tile = tl.program_id(0)
    follow(OVERLAP)
    if TOP > 0:
        stripes = tl.cdiv(size_out, ROWS)
        piece, n = tile // stripes, tile % stripes * ROWS + tl.arange(0, ROWS)
        if piece >= tl.load(work):
            return
        m = tl.load(work + 5 + 4 * piece) + tl.arange(0, NUM)
        real = m < tl.load(work + 6 + 4 * piece)
        row = tl.load(work + 4 + 4 * piece) * (size_out * (2 if GATED else 1)) + n
        m = tl.load(order + m, mask=real, other=0)
        source = m // TOP
    else:
        stripes = tl.cdiv(num, NUM)
        m, n = tile % stripes * NUM + tl.arange(0, NUM), tile // stripes * ROWS + tl.arange(0, ROWS)
        real, source, row = m < num, m, n
    units = columns // FORM.unit
    share = tl.cdiv(tl.cdiv(units, UNITS), SPLITS) * UNITS
    first, k = tl.program_id(1) * share, tl.arange(0, UNITS * _EIGHT)
    kind = x.dtype.element_ty
    x += source.to(tl.int64)[:, None] * x_stride + (k // _EIGHT * FORM.unit + k % _EIGHT)[None, :]
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for at in range(first, tl.minimum(first + share, units), UNITS):
        u = at + tl.arange(0, UNITS)
        exist = (n < size_out)[:, None] & (u < units)[None, :]
        held = real[:, None] & (at + k // _EIGHT < units)[None, :]
        words, high, scale, low = _held(bits, row, u, exist, units, FORM)
        if GATED:
            words2, high2, scale2, low2 = _held(bits, row + size_out, u, exist, units, FORM)
        for q in tl.static_range(FORM.unit // _EIGHT):
            a = tl.trans(tl.load(x + (at * FORM.unit + q * _EIGHT), mask=held, other=0.0))
            w = _eight(words, high, bits.powers, scale, low, q, FORM, kind)
            acc = tl.dot(w, a, acc, input_precision="ieee")
            if GATED:
                w = _eight(words2, high2, bits.powers, scale2, low2, q, FORM, kind)
                up = tl.dot(w, a, up, input_precision="ieee")
    acc, up = tl.trans(acc), tl.trans(up)
    inside = real[:, None] & (n < size_out)[None, :]
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
        acc += tl.load(bias + row, mask=n < size_out, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + row + size_out, mask=n < size_out, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out.dtype.element_ty)
    if GATED:
        y = gate_times(y, up.to(out.dtype.element_ty), ACTIVATION)
    tl.store(out + m.to(tl.int64)[:, None] * out_stride + n[None, :], y, mask=inside)
