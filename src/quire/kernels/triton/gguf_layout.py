"""GPU layout of GGUF weights: the blocks of a file are split into planes.

A unit is 16 or 32 columns of a row with the same scale; a thread multiplies one unit. The low bits of its
codes fill whole 32-bit words, and the high bits are one number. Values that a unit has once, such as its
scale, are interleaved for `TILE` rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.gguf_grid import GRID_KINDS, read_grid_blocks

TILE = 4
"""Number of adjacent weight rows whose values per unit, such as scales, are stored interleaved."""
_MOST_WEIGHTS = 1 << 24
"""Maximum elements of a weight that are packed at a time."""
_ALIGNMENT = 128


class Kind(NamedTuple):
    """Layout of a ggml type. A weight is scale * (code - zero), or with a `book` scale * book[code]. If the
    type has `lows` (minima), the low of the unit is subtracted."""

    stored_bytes: int
    stored_columns: int
    low: int
    """Number of low bits of a code, which are stored in words."""
    high: int
    """Number of high bits of a code, which are stored in a plane of their own."""
    unit: int
    zero: int = 0
    lows: bool = False
    subs: str = ""
    """Storage of the sub-scales of units, integers that multiply a scale per 256 columns: `bytes`, or
    `nibbles` with scale and low in one byte. Empty: there are only scales per 32 columns."""
    halved: bool = False
    """Whether each half of a unit has its own sub-scale; the scale of the 256 columns is then stored
    twice."""
    book: str = ""
    """Table that codes index: llama.cpp's IQ2, IQ3 or IQ4 (`iq2`, `iq3_xxs`, `iq3_s`, `iq4`), or 4-bit floats
    (`e2m1`)."""

    @property
    def words(self) -> int:
        """Return the number of 32-bit words with the low bits of a unit."""
        return self.unit * self.low // 32


class GGUFPlanes(NamedTuple):
    """Rows of a GGUF weight, split into codes, scales and sub-scales."""

    codes: Tensor
    """[rows, columns] uint8"""
    scales: Tensor
    """[rows, columns / 32 or 256, 1 or 2]: scales, and lows if the type has them"""
    subs: Tensor | None = None
    """[rows, units, 1 or 2] int8: sub-scales, and lows if the type has them"""


KINDS = {
    "Q4_0": Kind(18, 32, 4, 0, 32, zero=8),
    "Q4_1": Kind(20, 32, 4, 0, 32, lows=True),
    "Q5_0": Kind(22, 32, 4, 1, 32, zero=16),
    "Q5_1": Kind(24, 32, 4, 1, 32, lows=True),
    "Q8_0": Kind(34, 32, 8, 0, 16, zero=128),
    "Q2_K": Kind(84, 256, 2, 0, 16, lows=True, subs="nibbles"),
    "Q3_K": Kind(110, 256, 2, 1, 16, zero=4, subs="bytes"),
    "Q4_K": Kind(144, 256, 4, 0, 32, lows=True, subs="bytes"),
    "Q5_K": Kind(176, 256, 4, 1, 32, lows=True, subs="bytes"),
    "Q6_K": Kind(210, 256, 4, 2, 32, zero=32, subs="bytes", halved=True),
    "IQ4_NL": Kind(18, 32, 4, 0, 32, book="iq4"),
    "IQ4_XS": Kind(136, 256, 4, 0, 32, subs="bytes", book="iq4"),
    "MXFP4": Kind(17, 32, 4, 0, 32, book="e2m1"),
    "IQ2_XXS": Kind(66, 256, 4, 0, 32, subs="bytes", book="iq2"),
    "IQ2_XS": Kind(74, 256, 4, 0, 16, subs="bytes", book="iq2"),
    "IQ2_S": Kind(82, 256, 4, 0, 16, subs="bytes", book="iq2"),
    "IQ3_XXS": Kind(98, 256, 4, 0, 32, subs="bytes", book="iq3_xxs"),
    "IQ3_S": Kind(110, 256, 4, 0, 32, subs="bytes", book="iq3_s"),
}


class Planes(NamedTuple):
    """Packed weight [rows, columns] in the layout of the GPU kernels; all tensors but `powers` are views of
    `data`."""

    kind: str
    rows: int
    columns: int
    low: Tensor
    """[rows, units, words] int32: low bits of the codes; with one word per unit, [rows / TILE, units,
    TILE]"""
    high: Tensor
    """[rows / TILE, units, TILE] int16: high bits of the codes. With 4 words per unit, [rows, `high_stride`]
    int16: each byte has the high bits of half a word; with one bit per code, its upper nibble is of the next
    unit."""
    subs: Tensor
    """[rows / TILE, units, TILE, 1 or 2] int8: sub-scales, and lows if the type has them"""
    scales: Tensor
    """[rows / TILE, columns / 32 or 256, TILE, 1 or 2]: scales, and lows if the type has them"""
    data: Tensor
    powers: Tensor
    """[4] float32: powers of 2^low"""


def pack(parts: Sequence[Tensor], kind: str, device: torch.device) -> Planes:
    """Return the packed weight whose rows are those of all `parts`, each [rows, bytes] as in a GGUF file."""
    form = KINDS[kind]
    rows = sum(len(part) for part in parts)
    columns = parts[0].shape[1] // form.stored_bytes * form.stored_columns
    planes = _allocate(kind, rows, columns, device)
    step = max(_MOST_WEIGHTS // columns // TILE, 1) * TILE
    at = 0
    for part in _align_parts(parts):
        for start in range(0, len(part), step):
            chunk = part[start : start + step].to(device)
            _fill(planes, at, _READERS[kind](chunk.view(len(chunk), -1, form.stored_bytes)))
            at += len(chunk)
    return planes


def _align_parts(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `parts`; if some part does not begin at a multiple of TILE rows, concatenate them to one."""
    return [torch.cat(list(parts))] if any(len(part) % TILE for part in parts[:-1]) else parts


def _allocate(kind: str, rows: int, columns: int, device: torch.device) -> Planes:
    form = KINDS[kind]
    units, tiles, num_scales = columns // form.unit, -(-rows // TILE), 1 + (form.lows or form.halved)
    wide = torch.bfloat16 if kind == "MXFP4" else torch.float16
    shapes = {
        "low": ((rows, units, form.words) if form.words > 1 else (tiles, units, TILE), torch.int32),
        "high": (_high_shape(form, rows, units), torch.int16),
        "subs": (
            (tiles, units, TILE, 1 + (form.lows and form.subs == "bytes" or form.halved))
            if form.subs
            else (0,),
            torch.int8,
        ),
        "scales": ((tiles, columns // form.stored_columns, TILE, num_scales), wide),
    }
    sizes = [-(-torch.Size(s).numel() * t.itemsize // _ALIGNMENT) * _ALIGNMENT for s, t in shapes.values()]
    data = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    low, high, subs, scales = (
        piece[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        for piece, (shape, dtype) in zip(data.split(sizes), shapes.values(), strict=True)
    )
    powers = torch.tensor([2.0 ** (form.low * i) for i in range(4)], device=device)
    return Planes(kind, rows, columns, low, high, subs, scales, data, powers)


def high_stride(form: Kind, units: int) -> int:
    """Return the row stride in int16 of high bits with 4 words per unit; TMA needs multiples of 16 bytes."""
    return -(-units * form.high // 4) * 8


def _high_shape(form: Kind, rows: int, units: int) -> tuple[int, ...]:
    if not form.high:
        return (0,)
    return (rows, high_stride(form, units)) if form.words == 4 else (-(-rows // TILE), units, TILE)


def _pack_high(high: Tensor, form: Kind, stride: int) -> Tensor:
    """Pack the high bits of placed codes [rows, units, words, 8] into [rows, stride] int16."""
    parts = high.unflatten(-1, (2, 4)).flatten(2, 3)
    lanes = sum(parts[..., i] << (form.high * i) for i in range(4))
    assert isinstance(lanes, Tensor)
    if form.high == 1:
        lanes = torch.cat((lanes, lanes.new_zeros(len(lanes), lanes.shape[1] % 2, 8)), 1)
        lanes = lanes[:, ::2] | lanes[:, 1::2] << 4
    flat = lanes.flatten(1)
    padded = torch.cat((flat, flat.new_zeros(len(flat), 2 * stride - flat.shape[1])), 1)
    return padded.view(torch.int16)


def _fill(planes: Planes, at: int, blocks: GGUFPlanes) -> None:
    """Write `blocks` to the rows of `planes` from `at` on, a multiple of TILE."""
    form, num = KINDS[planes.kind], len(blocks.codes)
    codes = placed(blocks.codes, form)
    low = in_bits(codes & ((1 << form.low) - 1), form.low).view(torch.int32).flatten(2)
    tile = slice(at // TILE, at // TILE + -(-num // TILE))
    if form.words > 1:
        planes.low[at : at + num] = low
    else:
        planes.low[tile] = _retile(low)
    if form.high and form.words == 4:
        planes.high[at : at + num] = _pack_high(codes >> form.low, form, planes.high.shape[1])
    elif form.high:
        planes.high[tile] = _retile(in_bits(codes >> form.low, form.high).flatten(2).view(planes.high.dtype))
    if blocks.subs is not None:
        planes.subs[tile] = _retile(blocks.subs).unflatten(1, blocks.subs.shape[1:]).transpose(2, 3)
    planes.scales[tile] = _retile(blocks.scales).unflatten(1, blocks.scales.shape[1:]).transpose(2, 3)


def placed(codes: Tensor, form: Kind) -> Tensor:
    """Reorder codes [rows, columns] to [rows, units, words, codes of a word]. Each word has codes of every 8
    columns of a unit, so that a thread loads 8 elements of x at once.

    With 4 words per unit, each half of a word has a code of each 8 columns; the lower codes of its bytes
    belong to the first 16.
    """
    if form.words == 4:
        eights = codes.view(len(codes), -1, form.unit // 16, 2, 4, 2)
        return eights.permute(0, 1, 4, 5, 3, 2).flatten(3)
    together = 8 // form.words
    apart: Tensor = codes.view(len(codes), -1, form.unit // 8, form.words, together)
    return apart.transpose(2, 3).flatten(3)


def in_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack the last axis of codes [..., n], `bits` bits each, without gaps: [..., bytes] uint8."""
    if bits == 8:
        return codes.contiguous()
    parts: Tensor = codes.unflatten(-1, (-1, 8 // bits))
    out = parts[..., 0].clone()
    for i in range(1, 8 // bits):
        out |= parts[..., i] << (i * bits)
    return out


def _retile(numbers: Tensor) -> Tensor:
    """Interleave the rows of each tile of TILE rows, so that values of adjacent rows are adjacent in memory:
    [rows, ...] -> [rows / TILE, all other axes, TILE]."""
    flat = numbers.flatten(1)
    if missing := -len(flat) % TILE:
        flat = torch.cat((flat, flat.new_zeros(missing, flat.shape[1])))
    tiles: Tensor = flat.unflatten(0, (-1, TILE))
    return tiles.transpose(1, 2)


def _float16s(block: Tensor, *at: int) -> Tensor:
    """Return the float16 numbers at byte offsets `at` of each block: [rows, blocks, len(at)]."""
    return torch.cat([block[..., i : i + 2].contiguous().view(torch.float16) for i in at], -1)


def _read_codes(codes: Tensor, width: int, *shifts: int, bits: int) -> Tensor:
    """Unpack codes of `bits` bits, of which each byte has several. Each run of `width` bytes gives one run of
    codes for each of `shifts`: those that begin at this bit of the bytes."""
    runs: Tensor = codes.unflatten(-1, (-1, 1, width))
    by = torch.tensor(shifts, dtype=torch.uint8, device=codes.device).view(-1, 1)
    return (runs >> by & ((1 << bits) - 1)).flatten(-3)


def _q4_q5(block: Tensor, *, lows: bool, fifth: bool) -> GGUFPlanes:
    """Split blocks [rows, blocks, bytes] of Q4_0, Q4_1, Q5_0 or Q5_1 into planes."""
    heads = _float16s(block, 0, 2) if lows else _float16s(block, 0)
    if lows:
        heads[..., 1].neg_()
    at = 4 if lows else 2
    codes = _read_codes(block[..., at + 4 * fifth :], 16, 0, 4, bits=4)
    if fifth:
        bits = _read_codes(block[..., at : at + 4], 1, *range(8), bits=1)
        codes |= bits << 4
    return GGUFPlanes(codes.flatten(1), heads)


def _q8(block: Tensor) -> GGUFPlanes:
    return GGUFPlanes((block[..., 2:] ^ 128).flatten(1), _float16s(block, 0))


def _q2_k(block: Tensor) -> GGUFPlanes:
    codes = _read_codes(block[..., 16:80], 32, 0, 2, 4, 6, bits=2)
    subs = block[..., :16].contiguous().view(torch.int8)
    return GGUFPlanes(codes.flatten(1), _float16s(block, 80, 82), subs.flatten(1)[..., None])


def _q3_k(block: Tensor) -> GGUFPlanes:
    codes = _read_codes(block[..., 32:96], 32, 0, 2, 4, 6, bits=2)
    codes |= _read_codes(block[..., :32], 32, *range(8), bits=1) << 2
    low = _read_codes(block[..., 96:104], 8, 0, 4, bits=4)
    high = _read_codes(block[..., 104:108], 4, 0, 2, 4, 6, bits=2)
    subs = (low | high << 4).to(torch.int8) - 32
    return GGUFPlanes(codes.flatten(1), _float16s(block, 108), subs.flatten(1)[..., None])


def _q4_q5_k(block: Tensor, *, fifth: bool) -> GGUFPlanes:
    codes = _read_codes(block[..., 16 + 32 * fifth :], 32, 0, 4, bits=4)
    if fifth:
        codes |= _read_codes(block[..., 16:48], 32, *range(8), bits=1) << 4
    scale, low, both = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = torch.cat((scale & 63, both & 15 | scale >> 2 & 48), -1)
    lows = torch.cat((low & 63, both >> 4 | low >> 2 & 48), -1)
    subs = torch.stack((scales, lows), -1).to(torch.int8)
    return GGUFPlanes(codes.flatten(1), _float16s(block, 0, 2), subs.flatten(1, 2))


def _q6_k(block: Tensor) -> GGUFPlanes:
    codes = _read_codes(block[..., :128], 64, 0, 4, bits=4)
    codes |= _read_codes(block[..., 128:192], 32, 0, 2, 4, 6, bits=2) << 4
    subs = block[..., 192:208].contiguous().view(torch.int8)
    return GGUFPlanes(codes.flatten(1), _float16s(block, 208, 208), subs.unflatten(-1, (8, 2)).flatten(1, 2))


def _iq4_xs(block: Tensor) -> GGUFPlanes:
    codes = _read_codes(block[..., 8:], 16, 0, 4, bits=4)
    high = _read_codes(block[..., 2:4], 1, 0, 2, 4, 6, bits=2)
    subs = (_read_codes(block[..., 4:8], 1, 0, 4, bits=4) | high << 4).to(torch.int8) - 32
    return GGUFPlanes(codes.flatten(1), _float16s(block, 0), subs.flatten(1)[..., None])


def _mxfp4(block: Tensor) -> GGUFPlanes:
    """Split blocks of MXFP4 into planes. Scales are powers of two, which bfloat16 represents exactly."""
    exponents = block[..., :1].to(torch.int32)
    bits = torch.where(exponents > 0, exponents << 23, 1 << 22)
    codes = _read_codes(block[..., 1:], 16, 0, 4, bits=4)
    return GGUFPlanes(codes.flatten(1), bits.view(torch.float32).to(torch.bfloat16))


def _grid(block: Tensor, *, kind: str) -> GGUFPlanes:
    """Split blocks of IQ2 and IQ3 into planes."""
    codes, scales, subs = read_grid_blocks(block.flatten(1), kind)
    return GGUFPlanes(codes, scales[..., None], subs[..., None])


_READERS: dict[str, Callable[[Tensor], GGUFPlanes]] = {
    "Q4_0": lambda block: _q4_q5(block, lows=False, fifth=False),
    "Q4_1": lambda block: _q4_q5(block, lows=True, fifth=False),
    "Q5_0": lambda block: _q4_q5(block, lows=False, fifth=True),
    "Q5_1": lambda block: _q4_q5(block, lows=True, fifth=True),
    "Q8_0": _q8,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda block: _q4_q5_k(block, fifth=False),
    "Q5_K": lambda block: _q4_q5_k(block, fifth=True),
    "Q6_K": _q6_k,
    "IQ4_NL": lambda block: _q4_q5(block, lows=False, fifth=False),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    **{kind: partial(_grid, kind=kind) for kind in GRID_KINDS},
}
