"""GEMM of some rows with packed GGUF weights (`gguf_layout.py`) of types without a table.

The tensor cores take the weight as their first operand from registers, where codes are dequantized in
pairs."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.gguf import all_of, pairs_at, with_bias
from quire.kernels.triton.gguf_decode import DecodeForm, offset_of, to_float
from quire.kernels.triton.gguf_layout import TILE
from quire.kernels.triton.launch import follow
from quire.kernels.triton.matmul import tiled

_EIGHT = tl.constexpr(8)
_TILE = tl.constexpr(TILE)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def halves(words: Tensor, rows: int, units: int) -> TensorDescriptor:
    """Return a TMA descriptor of tiles [rows, units] of the 16-bit halves of words [size_out, units, 4]."""
    return tiled(words.view(torch.int16).flatten(1), rows, units * 8)


def beside(high: Tensor, rows: int, units: int, bits: int) -> TensorDescriptor:
    """Return a TMA descriptor of tiles [rows, units] of `Planes.high` with `bits` bits per code."""
    return tiled(high.view(torch.int8), rows, units * 4 * bits)


def takes(form: DecodeForm) -> bool:
    """Whether the kernels of this module support a format."""
    return form.words == 4 and form.book == ""


@triton.constexpr_function
def _pair_type(is_half: bool) -> tuple[str, int]:
    """Return the PTX type of a pair of 16-bit floats, and the bits of a float in whose mantissa a code
    fits."""
    return ("f16x2", 0x6400) if is_half else ("bf16x2", 0x4300)


@triton.constexpr_function
def _dequantize_asm(form: DecodeForm, place: int, is_half: bool) -> str:
    """Return PTX that dequantizes code number `place` of two 16-bit half words to a pair of floats."""
    kind, under = _pair_type(is_half)
    pair, at = "$3" if form.high else "$2", form.low * place
    above = f"0x{under:x}{under:x}"
    if form.low == 8 and not is_half:  # 7 bits fit; the eighth selects the number to subtract
        code = (
            f"lop3.b32 u, t, 0x00800080, 0x43804380, 0x6a; lop3.b32 t, t, 0x007f007f, {above}, 0xea;"
            f"sub.{kind} t, t, u;"
        )
    else:
        mask, zero = ("0x00ff00ff" if form.low == 8 else "0x000f000f"), under + form.zero
        code = f"lop3.b32 t, t, {mask}, {above}, 0xea;"
        if form.high:
            by, top = form.high * place - 4, (1 << form.high) - 1 << 4
            move = f"shr.b32 u, $2, {by};" if by >= 0 else f"shl.b32 u, $2, {-by};"
            code += f"{move} lop3.b32 t, u, 0x00{top:x}00{top:x}, t, 0xea;"
        if not form.group:
            code += f"mov.b32 u, 0x{zero:x}{zero:x}; sub.{kind} t, t, u;"
    last, low, upper = f"mul.{kind} $0, t, {pair};", f"{pair}, {pair}, 0x1010;", f"{pair}, {pair}, 0x3232;"
    if form.group:
        last = f"prmt.b32 v, {low} sub.{kind} t, t, v; prmt.b32 u, {upper} mul.{kind} $0, t, u;"
    if form.lows:
        last = f"prmt.b32 u, {low} prmt.b32 v, {upper} fma.rn.{kind} $0, t, u, v;"
    if form.halved:  # places 0 and 2 belong to the first half
        last = f"prmt.b32 u, {upper if place % 2 else low} mul.{kind} $0, t, u;"
    return f"{{ .reg .b32 t, u, v; shr.b32 t, $1, {at}; {code} {last} }}"


@triton.constexpr_function
def _scale_asm(is_half: bool, signed: bool) -> str:
    """Return PTX that multiplies two 8-bit integers, the sub-scales of a unit, by a pair of 16-bit floats."""
    kind, under = _pair_type(is_half)
    above, mixed = f"0x{under:x}{under:x}", f"0x{under >> 8:x}"
    if signed:  # 7 bits minus the 8th
        return (
            f"{{ .reg .b32 t, u; prmt.b32 t, $1, 0, 0x4140; lop3.b32 u, t, 0x00800080, {above}, 0xea;"
            f"lop3.b32 t, t, 0x007f007f, {above}, 0xea; sub.{kind} t, t, u; mul.{kind} $0, t, $2; }}"
        )
    return (
        f"{{ .reg .b32 t, u; mov.b32 u, {mixed}; prmt.b32 t, $1, u, 0x4140; mov.b32 u, {above};"
        f"sub.{kind} t, t, u; mul.{kind} $0, t, $2; }}"
    )


@triton.constexpr_function
def _convert_asm(lows: bool, is_half: bool) -> str:
    """Return PTX that converts a float16 scale to (scale, scale), or with `lows` two to (scale, -low)."""
    if is_half:
        return "xor.b32 $0, $1, 0x80000000;" if lows else "prmt.b32 $0, $1, $1, 0x1010;"
    both = "mov.b32 {a, b}, $1; cvt.f32.f16 x, a;"
    last = "cvt.f32.f16 y, b; neg.f32 y, y;" if lows else "mov.f32 y, x;"
    return f"{{ .reg .b16 a, b; .reg .f32 x, y; {both} {last} cvt.rn.bf16x2.f32 $0, y, x; }}"


@triton.jit
def _convert_pair(heads: tl.tensor, FORM: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """Return pairs of floats for `_decode` in dtype KIND: (scale, -low), or the scale twice for types without
    lows. The lower 16 bits of `heads` are float16 scales, the upper ones lows."""
    if _INTERPRETED:
        scale = heads.to(tl.int16).to(tl.float16, bitcast=True)
        low = (heads >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return _pack_pair(scale, -low if FORM.lows else scale, KIND)
    else:
        ASM: tl.constexpr = _convert_asm(FORM.lows, tl.float16 == KIND)
        return tl.inline_asm_elementwise(ASM, "=r,r", [heads], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _pack_pair(first: tl.tensor, second: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    low = first.to(tl.float32).to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (second.to(tl.float32).to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pairs_of(
    bits: tl.tuple, n: tl.tensor, at: tl.tensor, inside: tl.tensor, units: tl.tensor, total: tl.tensor,
    FORM: tl.constexpr, KIND: tl.constexpr, UNITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the pairs of 16-bit floats, such as (scale, -low), with which `_decode` dequantizes UNITS units,
    from unit `at` on, of weight rows `n` [R]. Each is repeated for the 8 half words of its unit: [R, UNITS *
    8]."""
    u, tile, r = at + tl.arange(0, UNITS), n.to(tl.int64)[:, None] // _TILE, n[:, None] % _TILE
    exists = inside[:, None] & (u < units)[None, :]
    WIDTH: tl.constexpr = (256 if FORM.subs != "" else 32) // FORM.unit
    stored = tile * (units // WIDTH)
    if FORM.group > 0 and FORM.group % (UNITS * FORM.unit) == 0:
        heads = tl.load(
            bits.scales + (at * FORM.unit // FORM.group * total + n)[:, None], mask=inside[:, None]
        )
        pair = tl.broadcast_to(heads, exists.shape)
    elif FORM.group > 0:
        pair_at = bits.scales + (u * FORM.unit // FORM.group * total)[None, :] + n[:, None]
        pair = tl.load(pair_at, mask=exists, other=0)
    elif FORM.subs == "":
        heads = tl.load(bits.scales + (stored + u[None, :] // WIDTH) * _TILE + r, mask=exists, other=0)
        pair = _convert_pair(heads.to(tl.int32), FORM, KIND)
    else:
        subs = tl.load(bits.subs + (tile * units + u[None, :]) * _TILE + r, mask=exists, other=0)
        heads = tl.load(bits.scales + (stored + at // WIDTH) * _TILE + r, mask=inside[:, None], other=0)
        heads = tl.broadcast_to(_convert_pair(heads.to(tl.int32), FORM, KIND), subs.shape)
        pair = _scale_pair(subs.to(tl.int32), heads, FORM, KIND)
    R: tl.constexpr = pair.shape[0]
    return tl.reshape(tl.broadcast_to(pair[:, :, None], [R, UNITS, _EIGHT]), [R, UNITS * _EIGHT])


@triton.jit
def _scale_pair(subs: tl.tensor, heads: tl.tensor, FORM: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    if _INTERPRETED:
        first = (subs << 24) >> 24 if FORM.halved else subs & 0xFF
        scale = first.to(tl.float32) * to_float(heads, KIND)
        return _pack_pair(scale, (subs >> 8).to(tl.float32) * to_float(heads >> 16, KIND), KIND)
    else:
        ASM: tl.constexpr = _scale_asm(tl.float16 == KIND, FORM.halved)
        return tl.inline_asm_elementwise(ASM, "=r,r,r", [subs, heads], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _decode(
    words: tl.tensor, high: tl.tensor, pair: tl.tensor,
    Q: tl.constexpr, FORM: tl.constexpr, KIND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Dequantize columns 8 Q to 8 Q + 7 of units from half words, their high bits, and the pairs of
    `pairs_of`, each [R, U * 8]."""
    PLACE: tl.constexpr = Q % 2 * (FORM.unit // 16) + Q // 2
    if _INTERPRETED:
        code = words.to(tl.int32) >> FORM.low * PLACE & ((1 << FORM.low) - 1)
        if FORM.high > 0:
            code |= (high.to(tl.int32) >> FORM.high * PLACE & ((1 << FORM.high) - 1)) << FORM.low
        number = code.to(tl.float32) - FORM.zero
        first, second = to_float(pair, KIND), to_float(pair >> 16, KIND)
        if FORM.group > 0:
            number = (number - (first - offset_of(FORM.low, tl.float16 == KIND))) * second
        elif FORM.lows:
            number = number * first + second
        else:
            number *= second if FORM.halved and Q > 1 else first
        return number.to(KIND)
    else:
        ASM: tl.constexpr = _dequantize_asm(FORM, PLACE, tl.float16 == KIND)
        if FORM.high > 0:
            pairs = tl.inline_asm_elementwise(
                ASM, "=r,r,r,r,r", [words, high, pair], dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            pairs = tl.inline_asm_elementwise(
                ASM, "=r,r,r,r", [words, pair], dtype=tl.int16, is_pure=True, pack=2
            )
        return pairs.to(KIND, bitcast=True)


@triton.jit
def _unpack_high(high: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Return the high bits of each half word; with one bit per code, a stored byte is for two units."""
    wide = high.to(tl.int16) & 255
    if FORM.high == 1:
        R: tl.constexpr = high.shape[0]
        U: tl.constexpr = high.shape[1] // _EIGHT
        both = tl.reshape(tl.join(wide & 15, wide >> 4), [R, U, _EIGHT, 2])
        return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [R, 2 * U * _EIGHT])
    else:
        return wide


@triton.jit
def numbers_of(
    words: tl.tensor, high: tl.tensor, pair: tl.tensor, FORM: tl.constexpr, KIND: tl.constexpr
) -> tl.tensor:
    """Return all dequantized columns of units, in order: [R, U * unit]. Threads exchange no data."""
    R: tl.constexpr = words.shape[0]
    U: tl.constexpr = words.shape[1] // _EIGHT
    if FORM.unit == 32:
        even = tl.join(_decode(words, high, pair, 0, FORM, KIND), _decode(words, high, pair, 2, FORM, KIND))
        odd = tl.join(_decode(words, high, pair, 1, FORM, KIND), _decode(words, high, pair, 3, FORM, KIND))
        joined = tl.join(even, odd)
    else:
        joined = tl.join(_decode(words, high, pair, 0, FORM, KIND), _decode(words, high, pair, 1, FORM, KIND))
    ordered = tl.permute(tl.reshape(joined, [R, U, _EIGHT, FORM.unit // _EIGHT]), (0, 1, 3, 2))
    return tl.reshape(ordered, [R, U * FORM.unit])


@triton.jit
def _load_weight(
    weight: tl.tensor, beside: tl.tensor, bits: tl.tuple, row: tl.tensor, at: tl.tensor, where: tl.tuple,
    FORM: tl.constexpr, KIND: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load and dequantize UNITS units, from unit `at` on, of a tile of weight rows: [ROWS, UNITS * unit]."""
    inside, units, total = where
    words = weight.load([row, at * _EIGHT])
    pair = pairs_of(bits, row + tl.arange(0, ROWS), at, inside, units, total, FORM, KIND, UNITS)
    if FORM.high > 0:
        high = _unpack_high(beside.load([row, at * _EIGHT * FORM.high // 2]), FORM)
        return numbers_of(words, high, pair, FORM, KIND)
    else:
        return numbers_of(words, words, pair, FORM, KIND)


@triton.jit
def _accumulate(
    x: tl.tensor, weight: tl.tensor, beside: tl.tensor, bits: tl.tuple, where: tl.tuple, steps: tl.tuple,
    KIND: tl.constexpr, GATED: tl.constexpr, FORM: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, APART: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the products [ROWS, NUM] of a tile of the weight with x, and if GATED those of the up
    projection. x is a descriptor of tiles, or pointers to its rows if they are `APART`."""
    row, size_out, inside, exists, units, first_m = where
    bounds, k = (inside, units, size_out * (2 if GATED else 1)), tl.arange(0, UNITS * FORM.unit)
    acc, up = tl.zeros([ROWS, NUM], tl.float32), tl.zeros([ROWS, NUM], tl.float32)
    for step in range(steps[0], steps[1]):
        at = step * UNITS
        if APART:
            valid = exists[:, None] & (at * FORM.unit + k < units * FORM.unit)[None, :]
            a = tl.load(x + (at * FORM.unit + k)[None, :], mask=valid, other=0.0)
        else:
            a = x.load([first_m, at * FORM.unit])
        w = _load_weight(weight, beside, bits, row, at, bounds, FORM, KIND, UNITS, ROWS)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        if GATED:
            w = _load_weight(weight, beside, bits, row + size_out, at, bounds, FORM, KIND, UNITS, ROWS)
            up = tl.dot(w, tl.trans(a), up, input_precision="ieee")
    return acc, up


@triton.jit
def _tile_rows(
    pairs: tl.tuple, tile: tl.tensor, num: tl.tensor, size_out: tl.tensor, TOP: tl.constexpr,
    GATED: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return what a tile of the GEMM computes: the indices of its rows of x (with experts, TOP > 0, of its
    pairs of a token and an expert) [NUM], the indices of its output columns [ROWS], which rows exist, and the
    weight row at which the tile begins."""
    if TOP > 0:
        m, n, exists, row = pairs_at(pairs[0], pairs[1], tile, size_out, NUM, ROWS)
        return m, n, exists, row * (2 if GATED else 1) + tile % tl.cdiv(size_out, ROWS) * ROWS
    else:
        stripes = tl.cdiv(num, NUM)
        m, row = tile % stripes * NUM + tl.arange(0, NUM), tile // stripes * ROWS
        return m, row + tl.arange(0, ROWS), m < num, row


@triton.jit(do_not_specialize=["num"])
def tiles(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, beside: tl.tensor, bits: tl.tuple, bias: tl.tensor,
    splits: tl.tuple, pairs: tl.tuple, num: tl.tensor, columns: tl.tensor, size_out: tl.tensor,
    x_stride: tl.tensor, out_stride: tl.tensor,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, TOP: tl.constexpr, NUM: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of the product of x with a packed weight; the arguments not named here are those of
    `gguf.tiles`. `weight` is a descriptor of tiles of half words, `beside` a descriptor of their high bits.
    `bits` are those of `gguf_launch.whole_bits_of`."""
    GATED: tl.constexpr = ACTIVATION != ""
    KIND: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(0)
    follow(OVERLAP)
    m, n, exists, row = _tile_rows(pairs, tile, num, size_out, TOP, GATED, NUM, ROWS)
    units = columns // FORM.unit
    share = tl.cdiv(tl.cdiv(units, UNITS), SPLITS)
    first = tl.program_id(1) * share
    stop = tl.minimum(first + share, tl.cdiv(units, UNITS))
    if TOP > 0:
        stop = tl.where(tl.max(exists.to(tl.int32), 0) > 0, stop, first)
        x += (m // TOP).to(tl.int64)[:, None] * x_stride
    where, steps = (row, size_out, n < size_out, exists, units, tile % tl.cdiv(num, NUM) * NUM), (first, stop)
    acc, up = _accumulate(x, weight, beside, bits, where, steps, KIND, GATED, FORM, NUM, ROWS, UNITS, TOP > 0)
    place, inside = m[None, :] * size_out + n[:, None], exists[None, :] & (n < size_out)[:, None]
    if SPLITS > 1:
        size = num * size_out
        part = splits[0] + tl.program_id(1) * size + place
        tl.store(part, acc, mask=inside)
        if GATED:
            tl.store(part + SPLITS * size, up, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(splits[1] + tile, 1) < SPLITS - 1:
            return
        tl.store(splits[1] + tile, 0)
        acc = all_of(splits[0] + place, inside, size, SPLITS)
        if GATED:
            up = all_of(splits[0] + SPLITS * size + place, inside, size, SPLITS)
    offsets = bias + (row + tl.arange(0, ROWS))
    y = tl.trans(with_bias(tl.trans(acc), offsets, n < size_out, BIASED)).to(KIND)
    if GATED:
        up = tl.trans(with_bias(tl.trans(up), offsets + size_out, n < size_out, BIASED))
        y = gate_times(y, up.to(KIND), ACTIVATION)
    tl.store(out + m.to(tl.int64)[None, :] * out_stride + n[:, None], y, mask=inside)
