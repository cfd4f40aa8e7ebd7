"""GEMV of one row of x with packed GGUF weights (`gguf_layout.py`) of types without a table, in integers.

A thread has one unit of each weight row and of x in registers. x is quantized to 16 bits, in steps of
1/32,512 of the unit's maximum, as a high and a low byte. Four codes are multiplied at once (dp4a) without a
relevant loss of precision. In shapes, R is a number of weight rows and U of units (16 or 32 columns).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.gguf_decode import beside_of, offset_of, to_float, words_of
from quire.kernels.triton.gguf_layout import TILE
from quire.kernels.triton.launch import follow


class WholeRows(NamedTuple):
    """Plan for `rows`: maximum programs, warps, and whether a program multiplies two tiles at a time."""

    programs: int
    warps: int
    two: bool = True


def programs(size_out: int, plan: WholeRows, *, gated: bool) -> int:
    """Return the number of programs, at most that of the plan, for `size_out` outputs, so that all programs
    process about the same number of tiles."""
    steps = triton.cdiv(size_out, TILE * 2 if plan.two and not gated else TILE)
    return int(triton.cdiv(steps, triton.cdiv(steps, plan.programs)))


_TILE = tl.constexpr(TILE)
_STEPS = tl.constexpr(32512.0)
_ROUND = tl.constexpr(12582912.0)
"""Constant that is added to a float, so that the low bits of the sum are the rounded integer."""
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot4(codes: tl.tensor, x: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """Add the products of four codes with four bytes of x [U] to `sums` [R, U]."""
    if _INTERPRETED:
        for i in tl.static_range(0, 32, 8):
            sums += (codes >> i & 255) * ((x << (24 - i)) >> 24)[None, :]
        return sums
    else:
        ASM: tl.constexpr = "dp4a.u32.s32 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [codes, x[None, :], sums], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _dot_sixteen(codes: tl.tuple, x: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """Add the products of four words of codes, each [R, U], with x [U, 4] to `sums`."""
    U: tl.constexpr = x.shape[0]
    even, odd = tl.split(tl.reshape(x, [U, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return _dot4(codes[3], d, _dot4(codes[2], c, _dot4(codes[1], b, _dot4(codes[0], a, sums))))


@triton.jit
def _split_four(words: tl.tensor) -> tl.tuple:
    """Split [R, U, 4] into four tensors."""
    R: tl.constexpr = words.shape[0]
    U: tl.constexpr = words.shape[1]
    even, odd = tl.split(tl.reshape(words, [R, U, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _shift_left(word: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    return word << BY if BY >= 0 else word >> -BY


@triton.jit
def _duplicate_bytes(bytes: tl.tensor) -> tl.tensor:
    """Return words with the lower two bytes of `bytes`, each twice."""
    if _INTERPRETED:
        first, second = bytes & 0xFF, bytes & 0xFF00
        return first | first << 8 | second << 8 | second << 16
    else:
        ASM: tl.constexpr = "prmt.b32 $0, $1, $1, 0x1100;"
        return tl.inline_asm_elementwise(ASM, "=r,r", [bytes], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _word_codes(word: tl.tensor, beside: tl.tensor, SECOND: tl.constexpr, FORM: tl.constexpr) -> tl.tensor:
    """Return the codes of a word and its high bits for the first or SECOND half of a unit, as four bytes."""
    code = word
    if FORM.low == 4:
        code = word >> 4 * SECOND & 0x0F0F0F0F
    if FORM.high > 0:
        doubled = _duplicate_bytes(beside)
        MASK: tl.constexpr = (1 << FORM.high) - 1 << 4
        code |= _shift_left(doubled, 4 - FORM.high * SECOND) & (MASK | MASK << 16)
        code |= _shift_left(doubled, 4 - FORM.high * (2 + SECOND)) & (MASK << 8 | MASK << 24)
    return code


@triton.jit
def _unit_codes(words: tl.tensor, beside: tl.tensor, SECOND: tl.constexpr, FORM: tl.constexpr) -> tl.tuple:
    """Return the codes of the first or SECOND half of a unit from its 4 words [R, U, 4]: four tensors [R, U]
    with four codes each, as bytes."""
    a, b, c, d = _split_four(words)
    e, f, g, h = _split_four(beside)
    return (
        _word_codes(a, e, SECOND, FORM),
        _word_codes(b, f, SECOND, FORM),
        _word_codes(c, g, SECOND, FORM),
        _word_codes(d, h, SECOND, FORM),
    )


@triton.jit
def _pack_bytes(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Pack the low bytes of two runs of 8 columns, each [U, 8], to [U, 4] in the order of `_unit_codes`."""
    U: tl.constexpr = first.shape[0]
    even, odd = tl.split(tl.reshape(first & 255 | (second & 255) << 8, [U, 4, 2]))
    return even | odd << 16


@triton.jit
def _load_eight(
    x: tl.tensor, u: tl.tensor, valid: tl.tensor, Q: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    at = u[:, None] * UNIT + Q * 8 + tl.arange(0, 8)[None, :]
    return tl.load(x + at, mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def _round(x: tl.tensor, times: tl.tensor) -> tl.tensor:
    return (x * times[:, None] + _ROUND).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _quantize_sixteen(
    x: tl.tensor, u: tl.tensor, valid: tl.tensor, times: tl.tensor, Q: tl.constexpr, UNIT: tl.constexpr
) -> tl.tuple:
    """Return 16 columns of units of x, from 8 Q on, as integers: high bytes, low bytes, and the sum."""
    a, b = (
        _round(_load_eight(x, u, valid, Q, UNIT), times),
        _round(_load_eight(x, u, valid, Q + 1, UNIT), times),
    )
    return _pack_bytes(a + 128 >> 8, b + 128 >> 8), _pack_bytes(a, b), tl.sum(a + b, 1).to(tl.float32)


@triton.jit
def _quantize_units(x: tl.tensor, u: tl.tensor, valid: tl.tensor, UNIT: tl.constexpr) -> tl.tuple:
    """Quantize units `u` of x. Return the high and low bytes of their first halves, those of their second
    halves, the step [U], and the sums of both halves."""
    most = tl.zeros(u.shape, tl.float32)
    for q in tl.static_range(UNIT // 8):
        most = tl.maximum(most, tl.max(tl.abs(_load_eight(x, u, valid, q, UNIT)), 1))
    times = _STEPS / tl.maximum(most, 1e-30)
    high, low, total = _quantize_sixteen(x, u, valid, times, 0, UNIT)
    high2, low2, more = high, low, total
    if UNIT == 32:
        high2, low2, more = _quantize_sixteen(x, u, valid, times, 2, UNIT)
    step = most / _STEPS
    return high, low, high2, low2, step, total * step, more * step


@triton.jit
def _load_units(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, valid: tl.tensor, units: tl.tensor, total: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Load the words of units `u` of weight rows `n`, their high bits, scales and sub-scales; two scales or
    two sub-scales of a unit are one integer."""
    WIDTH: tl.constexpr = (256 if FORM.subs != "" else 32) // FORM.unit
    words = words_of(bits, n, u, valid, units, FORM)
    if FORM.group > 0:
        at = (u * FORM.unit // FORM.group * total)[None, :] + n[:, None]
        heads = tl.load(bits.scales + at, mask=valid, other=0)
        return words, words, heads, heads
    else:
        tile, r = n.to(tl.int64)[:, None] // _TILE, n[:, None] % _TILE
        at = (tile * (units // WIDTH) + u[None, :] // WIDTH) * _TILE + r
        heads = tl.load(bits.scales + at, mask=valid, other=0)
        subs = heads
        if FORM.subs != "":
            subs = tl.load(bits.subs + (tile * units + u[None, :]) * _TILE + r, mask=valid, other=0)
        high = words
        if FORM.high > 0:
            high = beside_of(bits, n, u, valid, units, FORM)
        return words, high, heads, subs


@triton.jit
def _dot_tile(held: tl.tuple, x: tl.tuple, FORM: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """Return the products [TILE] of weight rows (from `_load_units`) with x (from `_quantize_units`)."""
    words, beside, heads, subs = held
    high, low, high2, low2, step, total, more = x
    codes = _unit_codes(words, beside, 0, FORM)
    dot_high, dot_low = _dot_sixteen(codes, high, 0 * heads), _dot_sixteen(codes, low, 0 * heads)
    first = dot_high
    if FORM.halved:
        first = (dot_high << 8) + dot_low
        dot_high, dot_low = 0 * heads, 0 * heads
    elif FORM.low == 4:
        total += more
    if FORM.low == 4:
        codes = _unit_codes(words, beside, 1, FORM)
        dot_high, dot_low = _dot_sixteen(codes, high2, dot_high), _dot_sixteen(codes, low2, dot_low)
    dot = ((dot_high << 8) + dot_low).to(tl.float32) * step[None, :]
    if FORM.halved:
        sub, scale = subs.to(tl.int32), to_float(heads, tl.float16)
        one = first.to(tl.float32) * step[None, :] - total[None, :] * FORM.zero
        one *= ((sub << 24) >> 24).to(tl.float32)
        other = (dot - more[None, :] * FORM.zero) * (sub >> 8).to(tl.float32)
        return tl.sum((one + other) * scale, 1)
    elif FORM.group > 0:
        zero = to_float(heads, KIND) - offset_of(FORM.low, tl.float16 == KIND)
        return tl.sum((dot - total[None, :] * zero) * to_float(heads >> 16, KIND), 1)
    else:
        scale, sub = to_float(heads, tl.float16), subs.to(tl.int32)
        if FORM.subs != "":
            scale *= (sub & 255).to(tl.float32)
        offset = total[None, :] * FORM.zero * scale
        if FORM.lows:
            low = to_float(heads >> 16, tl.float16)
            if FORM.subs != "":
                low *= (sub >> 8).to(tl.float32)
            offset = low * total[None, :]
        return tl.sum(dot * scale - offset, 1)


@triton.jit
def rows(
    out: tl.tensor, x: tl.tensor, bits: tl.tuple, bias: tl.tensor, ids: tl.tensor, columns: tl.tensor,
    size_out: tl.tensor, x_stride: tl.tensor, out_stride: tl.tensor,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, TOP: tl.constexpr, TWO: tl.constexpr,
    UNITS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a row of x by one or TWO tiles of weight rows at a time; with an ACTIVATION, these are tiles
    of the gate and of the up projection. If TOP > 0, a row of out is a (token, expert) pair, of token pair /
    TOP and expert ids[pair]. Grid: (programs, rows of out)."""
    GATED: tl.constexpr = ACTIVATION != ""
    HEIGHT: tl.constexpr = 2 * _TILE if TWO and not GATED else _TILE
    pair, stride, start = tl.program_id(1), tl.num_programs(0), 0
    units, u, total = columns // FORM.unit, tl.arange(0, UNITS), size_out * (2 if GATED else 1)
    gap = size_out if GATED else _TILE
    if TOP > 0:
        follow(OVERLAP)
        start = tl.load(ids + pair) * total
        if start < 0:
            return
        x += (pair // TOP).to(tl.int64) * x_stride
    else:
        x += pair.to(tl.int64) * x_stride
    valid, n = u < units, tl.program_id(0) * HEIGHT + tl.arange(0, _TILE)
    held = _load_units(bits, start + n, u, (n < size_out)[:, None] & valid[None, :], units, total, FORM)
    inside2, held2 = _second_exists(n, size_out, GATED), held
    if TWO:
        held2 = _load_units(bits, start + gap + n, u, inside2[:, None] & valid[None, :], units, total, FORM)
    if TOP == 0:
        follow(OVERLAP)
    parts = _quantize_units(x, u, valid, FORM.unit)
    kind: tl.constexpr = out.dtype.element_ty
    out += pair.to(tl.int64) * out_stride
    for step in range(tl.program_id(0), tl.cdiv(size_out, HEIGHT), stride):
        n = step * HEIGHT + tl.arange(0, _TILE)
        inside, inside2, after = n < size_out, _second_exists(n, size_out, GATED), n + stride * HEIGHT
        loaded = (after < size_out)[:, None] & valid[None, :]
        ahead = _load_units(bits, start + after, u, loaded, units, total, FORM)
        y = _add_bias(_dot_tile(held, parts, FORM, kind), bias + start + n, inside, BIASED)
        held = ahead
        if TWO:
            loaded = _second_exists(after, size_out, GATED)[:, None] & valid[None, :]
            ahead = _load_units(bits, start + gap + after, u, loaded, units, total, FORM)
            y2 = _add_bias(_dot_tile(held2, parts, FORM, kind), bias + start + gap + n, inside2, BIASED)
            held2 = ahead
            if GATED:
                y = gate_times(y.to(kind), y2.to(kind), ACTIVATION)
            else:
                tl.store(out + n + _TILE, y2.to(kind), mask=inside2)
        tl.store(out + n, y.to(kind), mask=inside)


@triton.jit
def _add_bias(y: tl.tensor, bias: tl.tensor, inside: tl.tensor, BIASED: tl.constexpr) -> tl.tensor:
    if BIASED:
        y += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _second_exists(n: tl.tensor, size_out: tl.tensor, GATED: tl.constexpr) -> tl.tensor:
    """Whether rows of the second tile exist."""
    return n < (size_out if GATED else size_out - _TILE)
