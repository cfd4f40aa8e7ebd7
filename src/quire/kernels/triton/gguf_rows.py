"""A row of x times packed weights (`planes.py`) of whole codes, in whole numbers.

A thread has a unit of each row of the weight, and that of x: each number as two bytes, high and low, in steps
of a 32,512th of the unit's largest. So four codes are multiplied at once, and no bit of x that counts is
lost.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.gguf_decode import beside_of, offset_of, words_of
from quire.kernels.triton.gguf_layout import TILE
from quire.kernels.triton.launch import follow


class WholeRows(NamedTuple):
    """`rows` in so many programs at most, with one or two tiles of rows at a time."""

    programs: int
    warps: int
    two: bool = True


def programs(size_out: int, plan: WholeRows, *, gated: bool) -> int:
    """As many as have the same to do."""
    steps = triton.cdiv(size_out, TILE * 2 if plan.two and not gated else TILE)
    return int(triton.cdiv(steps, triton.cdiv(steps, plan.programs)))


_TILE = tl.constexpr(TILE)
_STEPS = tl.constexpr(32512.0)
_ROUND = tl.constexpr(12582912.0)
"""Added to a float it leaves a whole number in the low bits."""
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _four(codes: tl.tensor, x: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """`sums` [R, U] and the products of four codes with four bytes of x [U]."""
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
def _sixteen_times(codes: tl.tuple, x: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """The same of four words of codes, each [R, U], and of x [U, 4]."""
    U: tl.constexpr = x.shape[0]
    even, odd = tl.split(tl.reshape(x, [U, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return _four(codes[3], d, _four(codes[2], c, _four(codes[1], b, _four(codes[0], a, sums))))


@triton.jit
def _apart(words: tl.tensor) -> tl.tuple:
    """[R, U, 4] -> four."""
    R: tl.constexpr = words.shape[0]
    U: tl.constexpr = words.shape[1]
    even, odd = tl.split(tl.reshape(words, [R, U, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _left(word: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    return word << BY if BY >= 0 else word >> -BY


@triton.jit
def _twice(bytes: tl.tensor) -> tl.tensor:
    """The lower two of a word, each beside itself."""
    if _INTERPRETED:
        first, second = bytes & 0xFF, bytes & 0xFF00
        return first | first << 8 | second << 8 | second << 16
    else:
        ASM: tl.constexpr = "prmt.b32 $0, $1, $1, 0x1100;"
        return tl.inline_asm_elementwise(ASM, "=r,r", [bytes], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _code(word: tl.tensor, beside: tl.tensor, SECOND: tl.constexpr, FORM: tl.constexpr) -> tl.tensor:
    """Codes of the first or second half of a unit, in bytes."""
    code = word
    if FORM.low == 4:
        code = word >> 4 * SECOND & 0x0F0F0F0F
    if FORM.high > 0:
        twice = _twice(beside)
        MASK: tl.constexpr = (1 << FORM.high) - 1 << 4
        code |= _left(twice, 4 - FORM.high * SECOND) & (MASK | MASK << 16)
        code |= _left(twice, 4 - FORM.high * (2 + SECOND)) & (MASK << 8 | MASK << 24)
    return code


@triton.jit
def _codes(words: tl.tensor, beside: tl.tensor, SECOND: tl.constexpr, FORM: tl.constexpr) -> tl.tuple:
    """The same of 4 words, [R, U, 4]."""
    a, b, c, d = _apart(words)
    e, f, g, h = _apart(beside)
    return (
        _code(a, e, SECOND, FORM),
        _code(b, f, SECOND, FORM),
        _code(c, g, SECOND, FORM),
        _code(d, h, SECOND, FORM),
    )


@triton.jit
def _bytes(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The low bytes of two runs of 8 columns, [U, 8], where the codes of 4 words have theirs: [U, 4]."""
    U: tl.constexpr = first.shape[0]
    even, odd = tl.split(tl.reshape(first & 255 | (second & 255) << 8, [U, 4, 2]))
    return even | odd << 16


@triton.jit
def _eight(x: tl.tensor, u: tl.tensor, exist: tl.tensor, Q: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    at = u[:, None] * UNIT + Q * 8 + tl.arange(0, 8)[None, :]
    return tl.load(x + at, mask=exist[:, None], other=0.0).to(tl.float32)


@triton.jit
def _whole(x: tl.tensor, times: tl.tensor) -> tl.tensor:
    return (x * times[:, None] + _ROUND).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _sixteen(
    x: tl.tensor, u: tl.tensor, exist: tl.tensor, times: tl.tensor, Q: tl.constexpr, UNIT: tl.constexpr
) -> tl.tuple:
    """Columns 8 Q.. of units of x in whole numbers: high bytes, low bytes, and the sum."""
    a, b = _whole(_eight(x, u, exist, Q, UNIT), times), _whole(_eight(x, u, exist, Q + 1, UNIT), times)
    return _bytes(a + 128 >> 8, b + 128 >> 8), _bytes(a, b), tl.sum(a + b, 1).to(tl.float32)


@triton.jit
def _parts(x: tl.tensor, u: tl.tensor, exist: tl.tensor, UNIT: tl.constexpr) -> tl.tuple:
    """Of units of x: bytes of their first and second half, the step, and the sums."""
    most = tl.zeros(u.shape, tl.float32)
    for q in tl.static_range(UNIT // 8):
        most = tl.maximum(most, tl.max(tl.abs(_eight(x, u, exist, q, UNIT)), 1))
    times = _STEPS / tl.maximum(most, 1e-30)
    high, low, total = _sixteen(x, u, exist, times, 0, UNIT)
    high2, low2, more = high, low, total
    if UNIT == 32:
        high2, low2, more = _sixteen(x, u, exist, times, 2, UNIT)
    step = most / _STEPS
    return high, low, high2, low2, step, total * step, more * step


@triton.jit
def _number(word: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """In the lower half."""
    return word.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _held(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, total: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Words of units u of rows n, what is beside them, scales and subs, pairs as one."""
    WIDTH: tl.constexpr = (256 if FORM.subs != "" else 32) // FORM.unit
    words = words_of(bits, n, u, exist, units, FORM)
    if FORM.group > 0:
        at = (u * FORM.unit // FORM.group * total)[None, :] + n[:, None]
        heads = tl.load(bits.scales + at, mask=exist, other=0)
        return words, words, heads, heads
    else:
        tile, r = n.to(tl.int64)[:, None] // _TILE, n[:, None] % _TILE
        at = (tile * (units // WIDTH) + u[None, :] // WIDTH) * _TILE + r
        heads = tl.load(bits.scales + at, mask=exist, other=0)
        subs = heads
        if FORM.subs != "":
            subs = tl.load(bits.subs + (tile * units + u[None, :]) * _TILE + r, mask=exist, other=0)
        high = words
        if FORM.high > 0:
            high = beside_of(bits, n, u, exist, units, FORM)
        return words, high, heads, subs


@triton.jit
def _dot(held: tl.tuple, x: tl.tuple, FORM: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """Products of a tile of rows with x: [TILE]."""
    words, beside, heads, subs = held
    high, low, high2, low2, step, total, more = x
    codes = _codes(words, beside, 0, FORM)
    above, below = _sixteen_times(codes, high, 0 * heads), _sixteen_times(codes, low, 0 * heads)
    first = above
    if FORM.halved:
        first = (above << 8) + below
        above, below = 0 * heads, 0 * heads
    elif FORM.low == 4:
        total += more
    if FORM.low == 4:
        codes = _codes(words, beside, 1, FORM)
        above, below = _sixteen_times(codes, high2, above), _sixteen_times(codes, low2, below)
    dot = ((above << 8) + below).to(tl.float32) * step[None, :]
    if FORM.halved:
        sub, scale = subs.to(tl.int32), _number(heads, tl.float16)
        one = first.to(tl.float32) * step[None, :] - total[None, :] * FORM.zero
        one *= ((sub << 24) >> 24).to(tl.float32)
        other = (dot - more[None, :] * FORM.zero) * (sub >> 8).to(tl.float32)
        return tl.sum((one + other) * scale, 1)
    elif FORM.group > 0:
        zero = _number(heads, KIND) - offset_of(FORM.low, tl.float16 == KIND)
        return tl.sum((dot - total[None, :] * zero) * _number(heads >> 16, KIND), 1)
    else:
        scale, sub = _number(heads, tl.float16), subs.to(tl.int32)
        if FORM.subs != "":
            scale *= (sub & 255).to(tl.float32)
        least = total[None, :] * FORM.zero * scale
        if FORM.lows:
            low = _number(heads >> 16, tl.float16)
            if FORM.subs != "":
                low *= (sub >> 8).to(tl.float32)
            least = low * total[None, :]
        return tl.sum(dot * scale - least, 1)


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
    """Grid (programs, rows of out): one or TWO tiles of whole rows, `UNITS`, at a time, and every so many;
    with an activation the second is the up one's. If TOP > 0 a row of out is a pair's, of pair / TOP."""
    GATED: tl.constexpr = ACTIVATION != ""
    HEIGHT: tl.constexpr = 2 * _TILE if TWO and not GATED else _TILE
    pair, units, u, each = tl.program_id(1), columns // FORM.unit, tl.arange(0, UNITS), tl.num_programs(0)
    total, start = size_out * (2 if GATED else 1), 0
    apart = size_out if GATED else _TILE
    if TOP > 0:
        follow(OVERLAP)
        start = tl.load(ids + pair) * total
        if start < 0:
            return
        x += (pair // TOP).to(tl.int64) * x_stride
    else:
        x += pair.to(tl.int64) * x_stride
    known, n = u < units, tl.program_id(0) * HEIGHT + tl.arange(0, _TILE)
    held = _held(bits, start + n, u, (n < size_out)[:, None] & known[None, :], units, total, FORM)
    also, more = _also(n, size_out, GATED), held
    if TWO:
        more = _held(bits, start + apart + n, u, also[:, None] & known[None, :], units, total, FORM)
    if TOP == 0:
        follow(OVERLAP)
    parts = _parts(x, u, known, FORM.unit)
    kind: tl.constexpr = out.dtype.element_ty
    out += pair.to(tl.int64) * out_stride
    for step in range(tl.program_id(0), tl.cdiv(size_out, HEIGHT), each):
        n = step * HEIGHT + tl.arange(0, _TILE)
        inside, also, after = n < size_out, _also(n, size_out, GATED), n + each * HEIGHT
        some = (after < size_out)[:, None] & known[None, :]
        ahead = _held(bits, start + after, u, some, units, total, FORM)
        y = _with(_dot(held, parts, FORM, kind), bias + start + n, inside, BIASED)
        held = ahead
        if TWO:
            some = _also(after, size_out, GATED)[:, None] & known[None, :]
            ahead = _held(bits, start + apart + after, u, some, units, total, FORM)
            z = _with(_dot(more, parts, FORM, kind), bias + start + apart + n, also, BIASED)
            more = ahead
            if GATED:
                y = gate_times(y.to(kind), z.to(kind), ACTIVATION)
            else:
                tl.store(out + n + _TILE, z.to(kind), mask=also)
        tl.store(out + n, y.to(kind), mask=inside)


@triton.jit
def _with(y: tl.tensor, bias: tl.tensor, inside: tl.tensor, BIASED: tl.constexpr) -> tl.tensor:
    if BIASED:
        y += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _also(n: tl.tensor, size_out: tl.tensor, GATED: tl.constexpr) -> tl.tensor:
    """Whether rows of the second tile exist."""
    return n < (size_out if GATED else size_out - _TILE)
