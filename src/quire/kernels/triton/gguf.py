"""GEMM with packed GGUF weights (`gguf_layout.py`), x W^T; codes are dequantized in registers.

A unit is 16 or 32 columns of a weight row. `rows` is for one row of x; each thread has a unit of some weight
rows in registers. `tiles` dequantizes tiles of the weight for the tensor cores. With many rows of x, the
weight is unpacked in parts for the library's GEMM. In shapes, R is a number of weight rows and U of units.
"""

import triton
import triton.language as tl

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.gguf_decode import DecodeForm, high_of, number_of, scales_of, words_of
from quire.kernels.triton.gguf_layout import TILE
from quire.kernels.triton.launch import follow

_EIGHT = tl.constexpr(8)
"""Elements of x that a thread loads at once."""
_TILE = tl.constexpr(TILE)


@triton.constexpr_function
def _first_code(q: int, form: DecodeForm) -> int:
    """Return the index within its 32-bit word of the first code of columns 8 q to 8 q + 7 of a unit; see
    `gguf_layout.placed`."""
    return q % 2 * 2 ** (form.unit == 32) + q // 2 if form.words == 4 else q * (8 // form.words)


@triton.jit
def _add_code(
    sums: tl.tensor, excess: tl.tensor, words: tl.tensor, high: tl.tensor, powers: tl.tensor, x: tl.tensor,
    S: tl.constexpr, FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Add code S of each 32-bit word times x [U, words] to `sums` [R, U, words], and x times the excess of
    the codes (see `gguf_decode.py`) to `excess` [U, words]."""
    sums += number_of(words, high, powers, S, FORM) * x[None]
    if FORM.book == "":
        excess += x * (1 << FORM.low * (FORM.reach - 1 - S % FORM.reach))
    return sums, excess


@triton.jit
def _add_eight(
    sums: tl.tensor, excess: tl.tensor, words: tl.tensor, high: tl.tensor, powers: tl.tensor, x: tl.tensor,
    Q: tl.constexpr, FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Add the codes of columns 8 Q to 8 Q + 7 of each unit, times x [U, 8], to `sums`, and x times the excess
    of the codes to `excess`. Shapes are as in `_add_code`."""
    U: tl.constexpr = x.shape[0]
    S: tl.constexpr = _first_code(Q, FORM)
    if FORM.words == 4:
        a, b = tl.split(tl.reshape(x, [U, 4, 2]))
        sums, excess = _add_code(sums, excess, words, high, powers, a, S, FORM)
        sums, excess = _add_code(sums, excess, words, high, powers, b, S + 16 // FORM.low, FORM)
    elif FORM.words == 2:
        even, odd = tl.split(tl.reshape(x, [U, 2, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        sums, excess = _add_code(sums, excess, words, high, powers, a, S, FORM)
        sums, excess = _add_code(sums, excess, words, high, powers, b, S + 1, FORM)
        sums, excess = _add_code(sums, excess, words, high, powers, c, S + 2, FORM)
        sums, excess = _add_code(sums, excess, words, high, powers, d, S + 3, FORM)
    else:
        even, odd = tl.split(tl.reshape(x, [U, 1, 2, 2, 2]))
        for i in tl.static_range(2):
            left, right = tl.split(even if i == 0 else odd)
            a, c = tl.split(left)
            b, d = tl.split(right)
            sums, excess = _add_code(sums, excess, words, high, powers, a, S + i, FORM)
            sums, excess = _add_code(sums, excess, words, high, powers, b, S + i + 2, FORM)
            sums, excess = _add_code(sums, excess, words, high, powers, c, S + i + 4, FORM)
            sums, excess = _add_code(sums, excess, words, high, powers, d, S + i + 6, FORM)
    return sums, excess


@triton.jit
def _add_units(
    acc: tl.tensor, bits: tl.tuple, words: tl.tensor, n: tl.tensor, inside: tl.tensor, x: tl.tensor,
    u: tl.tensor, units: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the products of units `u` [U] of weight rows `n` [R] with the same columns of x to `acc` [R, U]."""
    exists = inside[:, None] & (u < units)[None, :]
    high = high_of(bits, n, u, exists, units, FORM)
    scale, low = scales_of(bits, n, u, exists, units, FORM)
    sums, total = tl.zeros(words.shape, tl.float32), tl.zeros(u.shape, tl.float32)
    WORDS: tl.constexpr = FORM.words
    excess = tl.zeros([words.shape[1], WORDS], tl.float32)
    place = x + u[:, None] * FORM.unit + tl.arange(0, _EIGHT)[None, :]
    for q in tl.static_range(FORM.unit // _EIGHT):
        values = tl.load(place + q * _EIGHT, mask=(u < units)[:, None], other=0.0).to(tl.float32)
        total += tl.sum(values, 1)
        sums, excess = _add_eight(sums, excess, words, high, bits.powers, values, q, FORM)
    dot = tl.sum(sums, 2)
    if FORM.book == "":
        MOST: tl.constexpr = 1 << FORM.low + FORM.high
        dot = (dot - tl.sum(excess, 1)[None, :]) * MOST - total[None, :] * FORM.zero
    acc += scale * dot
    if FORM.lows:
        acc -= low * total[None, :]
    return acc


@triton.jit
def _load_words(
    bits: tl.tuple, n: tl.tensor, second: tl.tensor, inside: tl.tensor, inside2: tl.tensor, u: tl.tensor,
    units: tl.tensor,
    FORM: tl.constexpr, TWO: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Load the 32-bit words of codes of weight rows `n` and, with TWO, those of the rows `second`, the
    program's second tile of weight rows."""
    words = words_of(bits, n, u, inside[:, None] & (u < units)[None, :], units, FORM)
    if TWO:
        return words, words_of(bits, second, u, inside2[:, None] & (u < units)[None, :], units, FORM)
    else:
        return words, words


@triton.jit
def rows(
    out: tl.tensor, x: tl.tensor, bits: tl.tuple, bias: tl.tensor, ids: tl.tensor, columns: tl.tensor,
    size_out: tl.tensor, x_stride: tl.tensor, out_stride: tl.tensor,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, TOP: tl.constexpr, TWO: tl.constexpr,
    UNITS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row of x by one or TWO tiles of weight rows. Grid: (size_out / rows, rows of out).

    With an ACTIVATION, the first tile is of the gate projection and the second of the up projection. If TOP >
    0, a row of out is a (token, expert) pair, of token pair / TOP and expert ids[pair].
    """
    pair, units, u = tl.program_id(1), columns // FORM.unit, tl.arange(0, UNITS)
    GATED: tl.constexpr = ACTIVATION != ""
    n = tl.program_id(0) * (_TILE * (2 if TWO and not GATED else 1)) + tl.arange(0, _TILE)
    start, gap = 0, size_out if GATED else _TILE
    inside, inside2 = n < size_out, n < (size_out if GATED else size_out - _TILE)
    if TOP > 0:
        follow(OVERLAP)
        start = tl.load(ids + pair) * (size_out * (2 if GATED else 1))
        if start < 0:
            return
        x += (pair // TOP).to(tl.int64) * x_stride
    else:
        x += pair.to(tl.int64) * x_stride
    row = start + n
    acc, acc2 = tl.zeros([_TILE, UNITS], tl.float32), tl.zeros([_TILE, UNITS], tl.float32)
    words, words2 = _load_words(bits, row, row + gap, inside, inside2, u, units, FORM, TWO)
    if TOP == 0:
        follow(OVERLAP)
    for first in range(0, units, UNITS):
        at = first + u
        ahead, ahead2 = _load_words(bits, row, row + gap, inside, inside2, at + UNITS, units, FORM, TWO)
        acc = _add_units(acc, bits, words, row, inside, x, at, units, FORM)
        if TWO:
            acc2 = _add_units(acc2, bits, words2, row + gap, inside2, x, at, units, FORM)
        words, words2 = ahead, ahead2
    y, y2 = tl.sum(acc, 1), tl.sum(acc2, 1)
    kind = out.dtype.element_ty
    if BIASED:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            y2 += tl.load(bias + row + gap, mask=inside2, other=0.0).to(tl.float32)
    out += pair.to(tl.int64) * out_stride
    if GATED:
        y = gate_times(y.to(kind), y2.to(kind), ACTIVATION).to(tl.float32)
    elif TWO:
        tl.store(out + n + _TILE, y2.to(kind), mask=inside2)
    tl.store(out + n, y.to(kind), mask=inside)


@triton.jit
def _dequantize_code(
    words: tl.tensor, high: tl.tensor, powers: tl.tensor, scale: tl.tensor, low: tl.tensor,
    S: tl.constexpr, FORM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    number = number_of(words, high, powers, S, FORM)
    if FORM.book != "":
        return number * scale
    else:
        return number * scale - (low + scale * (1 << FORM.low * (FORM.reach - 1 - S % FORM.reach)))


@triton.jit
def _dequantize_eight(
    words: tl.tensor, high: tl.tensor, powers: tl.tensor, scale: tl.tensor, low: tl.tensor,
    Q: tl.constexpr, FORM: tl.constexpr, kind: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the dequantized columns 8 Q to 8 Q + 7 of units, [R, U * 8] of dtype `kind`."""
    R: tl.constexpr = words.shape[0]
    U: tl.constexpr = words.shape[1]
    S: tl.constexpr = _first_code(Q, FORM)
    if FORM.halved:
        scale = scale if Q < 2 else low
        low = scale * (FORM.zero / (1 << FORM.low + FORM.high))
    if FORM.words == 4:
        a = _dequantize_code(words, high, powers, scale, low, S, FORM).to(kind)
        b = _dequantize_code(words, high, powers, scale, low, S + 16 // FORM.low, FORM).to(kind)
        joined = tl.join(a, b)
    elif FORM.words == 2:
        a = _dequantize_code(words, high, powers, scale, low, S, FORM).to(kind)
        b = _dequantize_code(words, high, powers, scale, low, S + 1, FORM).to(kind)
        c = _dequantize_code(words, high, powers, scale, low, S + 2, FORM).to(kind)
        d = _dequantize_code(words, high, powers, scale, low, S + 3, FORM).to(kind)
        joined = tl.join(tl.join(a, c), tl.join(b, d))
    else:
        a = _dequantize_code(words, high, powers, scale, low, S, FORM).to(kind)
        b = _dequantize_code(words, high, powers, scale, low, S + 1, FORM).to(kind)
        c = _dequantize_code(words, high, powers, scale, low, S + 2, FORM).to(kind)
        d = _dequantize_code(words, high, powers, scale, low, S + 3, FORM).to(kind)
        e = _dequantize_code(words, high, powers, scale, low, S + 4, FORM).to(kind)
        f = _dequantize_code(words, high, powers, scale, low, S + 5, FORM).to(kind)
        g = _dequantize_code(words, high, powers, scale, low, S + 6, FORM).to(kind)
        h = _dequantize_code(words, high, powers, scale, low, S + 7, FORM).to(kind)
        left = tl.join(tl.join(a, e), tl.join(c, g))
        right = tl.join(tl.join(b, f), tl.join(d, h))
        joined = tl.join(left, right)
    return tl.reshape(joined, [R, U * _EIGHT])


@triton.jit
def _load_units(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exists: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load the words and high bits of units `u` of weight rows `n`, and the scale and the subtrahend (`low`)
    with which `_dequantize_code` converts their codes."""
    words, high = words_of(bits, n, u, exists, units, FORM), high_of(bits, n, u, exists, units, FORM)
    scale, low = scales_of(bits, n, u, exists, units, FORM)
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
    out: tl.tensor, bits: tl.tuple, ids: tl.tensor, first_row: tl.tensor, num: tl.tensor, columns: tl.tensor,
    FORM: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Dequantize `num` weight rows from `first_row` on, or if CHOSEN the rows `ids`, to `out` [num, columns].
    Grid: (num / ROWS, units / UNITS)."""
    i, u = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    follow(OVERLAP)
    n = tl.load(ids + i, mask=i < num, other=0) if CHOSEN else first_row + i
    units = columns // FORM.unit
    exists = (i < num)[:, None] & (u < units)[None, :]
    words, high, scale, low = _load_units(bits, n, u, exists, units, FORM)
    k = tl.arange(0, UNITS * _EIGHT)
    at = (tl.program_id(1) * UNITS + k // _EIGHT) * FORM.unit + k % _EIGHT
    for q in tl.static_range(FORM.unit // _EIGHT):
        values = _dequantize_eight(words, high, bits.powers, scale, low, q, FORM, out.dtype.element_ty)
        place = out + i.to(tl.int64)[:, None] * columns + (at + q * _EIGHT)[None, :]
        tl.store(place, values, mask=(i < num)[:, None] & (at < columns)[None, :])


@triton.jit
def _dot_tile(
    acc: tl.tensor, x: tl.tensor, bits: tl.tuple, n: tl.tensor, inside: tl.tensor, exists: tl.tensor,
    at: tl.tensor, units: tl.tensor,
    FORM: tl.constexpr, UNITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add to `acc` [R, NUM] the products of UNITS units, from unit `at` on, of weight rows `n` [R] with the
    same columns of NUM rows of x."""
    u, k = at + tl.arange(0, UNITS), at + tl.arange(0, UNITS * _EIGHT) // _EIGHT
    words, high, scale, low = _load_units(bits, n, u, inside[:, None] & (u < units)[None, :], units, FORM)
    valid = exists[:, None] & (k < units)[None, :]
    for q in tl.static_range(FORM.unit // _EIGHT):
        a = tl.load(x + (at * FORM.unit + q * _EIGHT), mask=valid, other=0.0)
        w = _dequantize_eight(words, high, bits.powers, scale, low, q, FORM, a.dtype)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    return acc


@triton.jit
def all_of(parts: tl.tensor, inside: tl.tensor, size: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """Return the sum of the split-K results at `parts`, which are `size` elements apart."""
    acc = tl.zeros(inside.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts + split * size, mask=inside, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def pairs_at(
    order: tl.tensor, work: tl.tensor, tile: tl.tensor, size_out: tl.tensor,
    NUM: tl.constexpr, ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the (token, expert) pairs [NUM] of a tile, its outputs [ROWS], whether the pairs exist, and the
    first weight row of their expert."""
    stripes = tl.cdiv(size_out, ROWS)
    entry, n = tile // stripes, tile % stripes * ROWS + tl.arange(0, ROWS)
    valid, at = entry < tl.load(work), work + 4 + 4 * entry
    m = tl.load(at + 1, mask=valid, other=0) + tl.arange(0, NUM)
    exists = m < tl.load(at + 2, mask=valid, other=0)
    pair = tl.load(order + m, mask=exists, other=0)
    return pair, n, exists, tl.load(at, mask=valid, other=0) * size_out


@triton.jit(do_not_specialize=["num"])
def tiles(
    out: tl.tensor, x: tl.tensor, bits: tl.tuple, bias: tl.tensor, splits: tl.tuple, pairs: tl.tuple,
    num: tl.tensor, columns: tl.tensor, size_out: tl.tensor, x_stride: tl.tensor, out_stride: tl.tensor,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, TOP: tl.constexpr, NUM: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of the product of x with a packed weight on the tensor cores, like `_tiles` of
    matmul.py; `splits` are split-K results and arrival counters. The rows of the up projection follow those
    of the gate. If TOP > 0, a row of out is a (token, expert) pair, of token pair / TOP, and `pairs` are the
    sorted pairs (`moe_align.Sorted`). Grid: (tiles, SPLITS)."""
    GATED: tl.constexpr = ACTIVATION != ""
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    follow(OVERLAP)
    if TOP > 0:
        m, n, exists, row = pairs_at(pairs[0], pairs[1], tile, size_out, NUM, ROWS)
        source, row = m // TOP, row * (2 if GATED else 1) + n
    else:
        m, n = tile % stripes * NUM + tl.arange(0, NUM), tile // stripes * ROWS + tl.arange(0, ROWS)
        exists, source, row = m < num, m, n
    units = columns // FORM.unit
    share = tl.cdiv(tl.cdiv(units, UNITS), SPLITS) * UNITS
    first, k = tl.program_id(1) * share, tl.arange(0, UNITS * _EIGHT)
    x += source.to(tl.int64)[:, None] * x_stride + (k // _EIGHT * FORM.unit + k % _EIGHT)[None, :]
    stop = tl.minimum(first + share, units)
    if TOP > 0:
        stop = tl.where(tl.max(exists.to(tl.int32), 0) > 0, stop, first)
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for at in range(first, stop, UNITS):
        acc = _dot_tile(acc, x, bits, row, n < size_out, exists, at, units, FORM, UNITS)
        if GATED:
            up = _dot_tile(up, x, bits, row + size_out, n < size_out, exists, at, units, FORM, UNITS)
    acc, up = tl.trans(acc), tl.trans(up)
    inside = exists[:, None] & (n < size_out)[None, :]
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
