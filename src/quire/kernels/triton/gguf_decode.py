"""Codes of packed weights (`planes.py`) become numbers in registers.

The bits of a code are put behind the exponent of a float: 1 + code / 2^bits needs no conversion, and what is
too much is a multiple of the sum of x.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.gguf_layout import TILE

_TILE = tl.constexpr(TILE)


class DecodeForm(NamedTuple):
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
    halved: bool = False
    group: int = 0
    """Columns with a scale and a zero, as a `grouped.GroupedWeight` has, instead of zero, lows and subs."""


@triton.constexpr_function
def offset_of(bits: int, is_half: bool) -> int:
    """What a group's zero has added to it, so that it can be taken from a code as the kernels have it."""
    return 1024 if is_half else 128 if bits == 4 else -128


class Bits(NamedTuple):
    """The tensors of `planes.Planes`."""

    low: Any
    high: Any
    subs: Any
    scales: Any
    powers: Any


@triton.jit
def words_of(
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
def beside_of(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """High bits of 4 words of units u [U] of rows n [R], those of the halves of a word in two bytes:
    [R, U, 4]."""
    STRIDE = tl.cdiv(units * FORM.high, 4) * 8
    at = (u // 2 if FORM.high == 1 else u)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    at = tl.max_contiguous(at + n.to(tl.int64)[:, None, None] * STRIDE, [1, 2, 4])  # as in `words_of`
    both = tl.load(bits.high + at, mask=exist[:, :, None], other=0).to(tl.int32)
    return both >> (u % 2 * 4)[None, :, None] if FORM.high == 1 else both


@triton.jit
def high_of(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """The same of high bits, those of a word at the right end."""
    if FORM.high == 0:
        return tl.zeros([1, 1, 1], tl.int32)
    elif FORM.words == 4:
        both = beside_of(bits, n, u, exist, units, FORM)
        BITS: tl.constexpr = 4 * FORM.high
        return both & ((1 << BITS) - 1) | (both >> 8 & ((1 << BITS) - 1)) << BITS
    else:
        at = n.to(tl.int64)[:, None] // _TILE * (units * _TILE) + u[None, :] * _TILE + n[:, None] % _TILE
        all = tl.load(bits.high + at, mask=exist, other=0, eviction_policy="evict_first")
        shift = tl.arange(0, FORM.words) * (32 // FORM.low * FORM.high)
        return all.to(tl.int32)[:, :, None] >> shift[None, None, :]


@triton.jit
def scales_of(
    bits: tl.tuple, n: tl.tensor, u: tl.tensor, exist: tl.tensor, units: tl.tensor, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Scales and lows [R, U] of units u of rows n; if they are `halved`, scales of both halves."""
    EACH: tl.constexpr = 2 if FORM.lows or FORM.halved else 1
    WIDTH: tl.constexpr = (256 if FORM.subs != "" else 32) // FORM.unit
    tile, r = n.to(tl.int64)[:, None] // _TILE, n[:, None] % _TILE
    at = bits.scales + (tile * (units // WIDTH) + u[None, :] // WIDTH) * (EACH * _TILE) + r * EACH
    scale = tl.load(at, mask=exist, other=0.0).to(tl.float32)
    low = scale
    if FORM.lows:
        low = tl.load(at + 1, mask=exist, other=0.0).to(tl.float32)
    if FORM.subs == "nibbles":
        sub = tl.load(bits.subs + (tile * units + u[None, :]) * _TILE + r, mask=exist, other=0).to(tl.int32)
        return scale * (sub & 15).to(tl.float32), low * (sub >> 4 & 15).to(tl.float32)
    elif FORM.subs == "bytes":
        at_sub = bits.subs + (tile * units + u[None, :]) * (EACH * _TILE) + r * EACH
        if FORM.halved:
            low = scale * tl.load(at_sub + 1, mask=exist, other=0).to(tl.float32)
        scale *= tl.load(at_sub, mask=exist, other=0).to(tl.float32)
        if FORM.lows:
            low *= tl.load(at_sub + 1, mask=exist, other=0).to(tl.float32)
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
def number_of(
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
