"""Products with packed weights (`planes.py`), x W^T; codes become numbers in registers.

`rows` has a unit of some rows in each thread, for one row of x. `tiles` makes tiles of a weight for the
tensor cores. With many rows of x a weight is unpacked, a share at a time, and the library multiplies.
"""

import triton
import triton.language as tl

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.gguf_decode import DecodeForm, high_of, number_of, scales_of, words_of
from quire.kernels.triton.gguf_layout import TILE
from quire.kernels.triton.launch import follow

_EIGHT = tl.constexpr(8)
"""Numbers of x that a thread reads at once."""
_TILE = tl.constexpr(TILE)


@triton.constexpr_function
def _first_of(q: int, form: DecodeForm) -> int:
    """Which code of a word is the first of columns 8 q.. of a unit: `planes.placed`."""
    return q % 2 * 2 ** (form.unit == 32) + q // 2 if form.words == 4 else q * (8 // form.words)


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
    sums += number_of(words, high, powers, S, FORM) * x[None]
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
    S: tl.constexpr = _first_of(Q, FORM)
    if FORM.words == 4:
        a, b = tl.split(tl.reshape(x, [U, 4, 2]))
        sums, much = _times_one(sums, much, words, high, powers, a, S, FORM)
        sums, much = _times_one(sums, much, words, high, powers, b, S + 16 // FORM.low, FORM)
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
    high = high_of(bits, n, u, exist, units, FORM)
    scale, low = scales_of(bits, n, u, exist, units, FORM)
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
def _both(
    bits: tl.tuple,
    n: tl.tensor,
    second: tl.tensor,
    inside: tl.tensor,
    also: tl.tensor,
    u: tl.tensor,
    units: tl.tensor,
    FORM: tl.constexpr,
    TWO: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`words_of` of rows n, and if there are TWO tiles, of those of the second."""
    words = words_of(bits, n, u, inside[:, None] & (u < units)[None, :], units, FORM)
    if TWO:
        return words, words_of(bits, second, u, also[:, None] & (u < units)[None, :], units, FORM)
    else:
        return words, words


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
    start, apart = 0, size_out if GATED else _TILE
    inside, also = n < size_out, n < (size_out if GATED else size_out - _TILE)
    if TOP > 0:
        follow(OVERLAP)
        start = tl.load(ids + pair) * (size_out * (2 if GATED else 1))
        if start < 0:
            return
        x += (pair // TOP).to(tl.int64) * x_stride
    else:
        x += pair.to(tl.int64) * x_stride
    row = start + n
    acc, other = tl.zeros([_TILE, UNITS], tl.float32), tl.zeros([_TILE, UNITS], tl.float32)
    words, more = _both(bits, row, row + apart, inside, also, u, units, FORM, TWO)
    if TOP == 0:
        follow(OVERLAP)
    for first in range(0, units, UNITS):
        at = first + u
        ahead, behind = _both(bits, row, row + apart, inside, also, at + UNITS, units, FORM, TWO)
        acc = _sum(acc, bits, words, row, inside, x, at, units, FORM)
        if TWO:
            other = _sum(other, bits, more, row + apart, also, x, at, units, FORM)
        words, more = ahead, behind
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
    number = number_of(words, high, powers, S, FORM)
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
    S: tl.constexpr = _first_of(Q, FORM)
    if FORM.halved:
        scale = scale if Q < 2 else low
        low = scale * (FORM.zero / (1 << FORM.low + FORM.high))
    if FORM.words == 4:
        a = _value(words, high, powers, scale, low, S, FORM).to(kind)
        b = _value(words, high, powers, scale, low, S + 16 // FORM.low, FORM).to(kind)
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
    words, high = words_of(bits, n, u, exist, units, FORM), high_of(bits, n, u, exist, units, FORM)
    scale, low = scales_of(bits, n, u, exist, units, FORM)
    if FORM.book == "":
        MOST: tl.constexpr = 1 << FORM.low + FORM.high
        if FORM.halved:
            low *= MOST
        elif not FORM.lows:
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


@triton.jit
def _dot(
    acc: tl.tensor,
    x: tl.tensor,
    bits: tl.tuple,
    n: tl.tensor,
    inside: tl.tensor,
    real: tl.tensor,
    at: tl.tensor,
    units: tl.tensor,
    FORM: tl.constexpr,
    UNITS: tl.constexpr,
) -> tl.tensor:
    """`acc` [R, NUM] and the products of rows n with units at.. of rows of x, a pointer to their first 8."""
    u, k = at + tl.arange(0, UNITS), at + tl.arange(0, UNITS * _EIGHT) // _EIGHT
    words, high, scale, low = _held(bits, n, u, inside[:, None] & (u < units)[None, :], units, FORM)
    held = real[:, None] & (k < units)[None, :]
    for q in tl.static_range(FORM.unit // _EIGHT):
        a = tl.load(x + (at * FORM.unit + q * _EIGHT), mask=held, other=0.0)
        w = _eight(words, high, bits.powers, scale, low, q, FORM, a.dtype)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    return acc


@triton.jit
def all_of(parts: tl.tensor, inside: tl.tensor, size: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """The sum of what all splits have left at `parts`, `size` numbers apart."""
    acc = tl.zeros(inside.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts + split * size, mask=inside, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def pairs_at(
    order: tl.tensor,
    work: tl.tensor,
    tile: tl.tensor,
    size_out: tl.tensor,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of a tile of pairs with one expert: they, outputs, which pairs are real, the expert's first row."""
    stripes = tl.cdiv(size_out, ROWS)
    piece, n = tile // stripes, tile % stripes * ROWS + tl.arange(0, ROWS)
    there, at = piece < tl.load(work), work + 4 + 4 * piece
    m = tl.load(at + 1, mask=there, other=0) + tl.arange(0, NUM)
    real = m < tl.load(at + 2, mask=there, other=0)
    pair = tl.load(order + m, mask=real, other=0)
    return pair, n, real, tl.load(at, mask=there, other=0) * size_out


@triton.jit(do_not_specialize=["num"])
def tiles(
    out: tl.tensor,
    x: tl.tensor,
    bits: tl.tuple,
    bias: tl.tensor,
    splits: tl.tuple,
    pairs: tl.tuple,
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
    """Grid (num / NUM * size_out / ROWS, SPLITS): `_tiles` of matmul.py; parts and arrivals are `splits`.
    Rows of up are behind the gate's. If TOP > 0 rows of out are sorted pairs, of tokens pair / TOP."""
    GATED: tl.constexpr = ACTIVATION != ""
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    follow(OVERLAP)
    if TOP > 0:
        m, n, real, row = pairs_at(pairs[0], pairs[1], tile, size_out, NUM, ROWS)
        source, row = m // TOP, row * (2 if GATED else 1) + n
    else:
        m, n = tile % stripes * NUM + tl.arange(0, NUM), tile // stripes * ROWS + tl.arange(0, ROWS)
        real, source, row = m < num, m, n
    units = columns // FORM.unit
    share = tl.cdiv(tl.cdiv(units, UNITS), SPLITS) * UNITS
    first, k = tl.program_id(1) * share, tl.arange(0, UNITS * _EIGHT)
    x += source.to(tl.int64)[:, None] * x_stride + (k // _EIGHT * FORM.unit + k % _EIGHT)[None, :]
    stop = tl.minimum(first + share, units)
    if TOP > 0:
        stop = tl.where(tl.max(real.to(tl.int32), 0) > 0, stop, first)
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for at in range(first, stop, UNITS):
        acc = _dot(acc, x, bits, row, n < size_out, real, at, units, FORM, UNITS)
        if GATED:
            up = _dot(up, x, bits, row + size_out, n < size_out, real, at, units, FORM, UNITS)
    acc, up = tl.trans(acc), tl.trans(up)
    inside = real[:, None] & (n < size_out)[None, :]
    if SPLITS > 1:
        place = m[:, None] * size_out + n[None, :]
        tl.store(splits[0] + tl.program_id(1) * num * size_out + place, acc, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(splits[1] + tile, 1) < SPLITS - 1:
            return
        tl.store(splits[1] + tile, 0)
        acc = all_of(splits[0] + place, inside, num * size_out, SPLITS)
    y = with_bias(acc, bias + row, n < size_out, BIASED).to(out.dtype.element_ty)
    if GATED:
        up = with_bias(up, bias + row + size_out, n < size_out, BIASED)
        y = gate_times(y, up.to(out.dtype.element_ty), ACTIVATION)
    tl.store(out + m.to(tl.int64)[:, None] * out_stride + n[None, :], y, mask=inside)


@triton.jit
def with_bias(acc: tl.tensor, bias: tl.tensor, inside: tl.tensor, BIASED: tl.constexpr) -> tl.tensor:
    if BIASED:
        acc += tl.load(bias, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc
