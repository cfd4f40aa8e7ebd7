"""Dequantization of packed GGUF codes (`gguf_layout.py`) in registers.

The bits of a code are placed in the mantissa of a float, which gives 1 + code / 2^bits without a conversion.
The 1 (or a larger power of two) is the excess. It adds a multiple of the sum of x, which is subtracted later.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.gguf_layout import TILE

_TILE = tl.constexpr(TILE)


class DecodeForm(NamedTuple):
    """Format constants for which a kernel is compiled; see `gguf_layout.Kind`."""

    low: int
    high: int
    unit: int
    words: int
    zero: int
    lows: bool
    subs: str
    book: str
    reach: int
    """Number of codes of a word that one shift brings into a mantissa, each `low` bits lower in the mantissa
    than the next."""
    halved: bool = False
    group: int = 0
    """Columns per scale and zero of an `int4.GroupedWeight`, which replace zero, lows and subs; 0 for GGUF
    types."""


@triton.constexpr_function
def offset_of(bits: int, is_half: bool) -> int:
    """Return the offset that a code of `bits` bits has while its bits are in the mantissa of a float (a
    float16 if `is_half`). Zero points have it, too, so that it cancels in code - zero."""
    return 1024 if is_half else 128 if bits == 4 else -128


class Bits(NamedTuple):
    """Tensors of a packed weight as kernel arguments: those of `gguf_layout.Planes` with the same names."""

    low: Any
    high: Any
    subs: Any
    scales: Any
    powers: Any


@triton.jit
def words_of(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exists: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """Load the low bits of the codes of units `u` [U] of weight rows `n` [R]: [R, U, words] int32."""
    WORDS: tl.constexpr = FORM.words
    j = tl.arange(0, WORDS)[None, None, :]
    if WORDS == 1:
        at = n.to(tl.int64)[:, None, None] // _TILE * (units * _TILE) + n[:, None, None] % _TILE
        at += u[None, :, None] * _TILE + j
    else:
        at = n.to(tl.int64)[:, None, None] * (units * WORDS) + u[None, :, None] * WORDS + j
        # Units are not contiguous, but this hint makes adjacent threads load adjacent units instead of rows.
        at = tl.max_contiguous(at, [1, 2, WORDS])
    return tl.load(bits.low + at, mask=exists[:, :, None], other=0, eviction_policy="evict_first")


@triton.jit
def beside_of(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exists: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """Load the high bits of the codes in 4 words of units `u` [U] of weight rows `n` [R]: [R, U, 4]. An
    element has two bytes, for the two halves of a word."""
    STRIDE = tl.cdiv(units * FORM.high, 4) * 8
    at = (u // 2 if FORM.high == 1 else u)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    at = tl.max_contiguous(at + n.to(tl.int64)[:, None, None] * STRIDE, [1, 2, 4])  # as in `words_of`
    both = tl.load(bits.high + at, mask=exists[:, :, None], other=0).to(tl.int32)
    return both >> (u % 2 * 4)[None, :, None] if FORM.high == 1 else both


@triton.jit
def high_of(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exists: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """Load the high bits of units `u` [U] of weight rows `n` [R]: [R, U, words]. The lowest bits of an
    element are the high bits of the codes of one word."""
    if FORM.high == 0:
        return tl.zeros([1, 1, 1], tl.int32)
    elif FORM.words == 4:
        both = beside_of(bits, n, u, exists, units, FORM)
        BITS: tl.constexpr = 4 * FORM.high
        return both & ((1 << BITS) - 1) | (both >> 8 & ((1 << BITS) - 1)) << BITS
    else:
        at = n.to(tl.int64)[:, None] // _TILE * (units * _TILE) + u[None, :] * _TILE + n[:, None] % _TILE
        packed = tl.load(bits.high + at, mask=exists, other=0, eviction_policy="evict_first")
        shift = tl.arange(0, FORM.words) * (32 // FORM.low * FORM.high)
        return packed.to(tl.int32)[:, :, None] >> shift[None, None, :]


@triton.jit
def scales_of(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exists: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load the scales and lows (the subtracted minima) of units `u` [U] of weight rows `n` [R], each [R, U].
    For `halved` formats, load the scales of both halves of a unit."""
    PER_UNIT: tl.constexpr = 2 if FORM.lows or FORM.halved else 1
    WIDTH: tl.constexpr = (256 if FORM.subs != "" else 32) // FORM.unit
    tile, r = n.to(tl.int64)[:, None] // _TILE, n[:, None] % _TILE
    at = bits.scales + (tile * (units // WIDTH) + u[None, :] // WIDTH) * (PER_UNIT * _TILE) + r * PER_UNIT
    scale = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    low = scale
    if FORM.lows:
        low = tl.load(at + 1, mask=exists, other=0.0).to(tl.float32)
    if FORM.subs == "nibbles":
        sub = tl.load(bits.subs + (tile * units + u[None, :]) * _TILE + r, mask=exists, other=0).to(tl.int32)
        return scale * (sub & 15).to(tl.float32), low * (sub >> 4 & 15).to(tl.float32)
    elif FORM.subs == "bytes":
        at_sub = bits.subs + (tile * units + u[None, :]) * (PER_UNIT * _TILE) + r * PER_UNIT
        if FORM.halved:
            low = scale * tl.load(at_sub + 1, mask=exists, other=0).to(tl.float32)
        scale *= tl.load(at_sub, mask=exists, other=0).to(tl.float32)
        if FORM.lows:
            low *= tl.load(at_sub + 1, mask=exists, other=0).to(tl.float32)
        return scale, low
    else:
        return scale, low


@triton.jit
def to_float(word: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return the lower 16 bits of each word, a float of type KIND, in float32."""
    return word.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _shift_right(bits: tl.tensor, RIGHT: tl.constexpr) -> tl.tensor:
    if RIGHT >= 0:
        return bits >> RIGHT
    else:
        return bits << (-RIGHT)


@triton.jit
def number_of(
    words: tl.tensor, high: tl.tensor, powers: tl.tensor, S: tl.constexpr, FORM: tl.constexpr
) -> tl.tensor:
    """Return code S of each word divided by a power of two, plus an excess that is a power of two; for `book`
    formats, return the value from the table.

    The powers of two are loaded, because constants would cost one more instruction.
    """
    DEPTH: tl.constexpr = FORM.low * (FORM.reach - 1 - S % FORM.reach)
    FIRST: tl.constexpr = 23 - FORM.high - FORM.low - DEPTH
    if FORM.book == "e2m1":
        tiny = _shift_right(words, 4 * S - 22) & (7 << 22) | _shift_right(words, 4 * S - 28) & -(1 << 31)
        return tiny.to(tl.float32, bitcast=True) * 2.0**126
    elif FORM.book == "iq2" or FORM.book == "iq3_xxs" or FORM.book == "iq3_s":
        t = (words >> 4 * S & 7).to(tl.float32)
        if FORM.book == "iq2":
            size = 1.0 + (2.0625 + 0.0625 * t) * t  # 8, 25 and 43, divided by 8
        elif FORM.book == "iq3_xxs":
            size = 2.0 * t + tl.where(t == 7, 1.5, 1.0)  # 4, 12 to 52 and 62, divided by 4
        else:
            size = 2.0 * t + 1.0
        sign = _shift_right(words, 4 * S - 28) & -(1 << 31)
        return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        power = tl.load(powers + DEPTH // FORM.low).to(tl.int32, bitcast=True)
        code = _shift_right(words, FORM.low * S - FIRST) & (((1 << FORM.low) - 1) << FIRST) | power
        if FORM.high > 0:
            TOP: tl.constexpr = FIRST + FORM.low
            code ^= _shift_right(high, FORM.high * S - TOP) & (((1 << FORM.high) - 1) << TOP)
        number = code.to(tl.float32, bitcast=True)
        if FORM.book == "iq4":  # values lie on this curve; the last two operations round it
            t = number - (1 << DEPTH)
            curve = (((103.94 * t + 127.33) * t - 351.21) * t + 386.78) * t - 126.57
            return (curve + 12582912.0) - 12582912.0
        else:
            return number
