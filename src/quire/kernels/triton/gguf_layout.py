"""Packed weights as a GPU reads them: the blocks of a GGUF file taken apart into planes.

A unit is 16 or 32 columns of a row that share a scale; a thread multiplies one. The low bits of its codes are
whole words, the high bits one number. What a unit has one of lies side by side for `TILE` rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 4
"""Rows of which the numbers of a unit lie side by side."""
_MOST_WEIGHTS = 1 << 24
"""That are taken apart at a time."""
_ALIGNMENT = 128


class Kind(NamedTuple):
    """How a ggml type is kept: a code stands for scale * (code - zero) - low, or scale * a book's number."""

    stored_bytes: int
    stored_columns: int
    low: int
    """Bits of a code in words."""
    high: int
    """Bits beside them."""
    unit: int
    zero: int = 0
    lows: bool = False
    subs: str = ""
    """Scales of units, whole numbers times one of 256 columns: `bytes`, or scale and low in a byte
    (`nibbles`). Else there are only those of 32 columns."""
    halved: bool = False
    """Whether each half of a unit has a sub of its own; what they multiply stands there twice."""
    book: str = ""
    """Codes that stand for other numbers: of llama.cpp's IQ4 (`iq4`), or floats of 4 bits (`e2m1`)."""

    @property
    def words(self) -> int:
        """Of a unit."""
        return self.unit * self.low // 32


class GGUFPlanes(NamedTuple):
    """Rows taken apart, [rows, ...] each."""

    codes: Tensor
    """[rows, columns] uint8"""
    scales: Tensor
    """Of 32 or 256 columns: [rows, columns / those, 1 or 2], with the lows."""
    subs: Tensor | None = None
    """[rows, units, 1 or 2] int8"""


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
}


class Planes(NamedTuple):
    """A weight [rows, columns]; all but the last are views of `data`."""

    kind: str
    rows: int
    columns: int
    low: Tensor
    """[rows, units, words] int32; of one word a unit, [rows / TILE, units, TILE]"""
    high: Tensor
    """[rows / TILE, units, TILE] int16; of 4 words a unit, [rows, `high_stride`] int16: for each half of a
    word the bits of its codes, in a byte or, with the next unit's above, in half of one"""
    subs: Tensor
    """[rows / TILE, units, TILE, 1 or 2] int8"""
    scales: Tensor
    """[rows / TILE, columns / 32 or 256, TILE, 1 or 2]"""
    data: Tensor
    powers: Tensor
    """[4] float32: powers of 2^low"""


def pack(parts: Sequence[Tensor], kind: str, device: torch.device) -> Planes:
    """[rows, bytes] each as in a GGUF file, one behind the other."""
    form = KINDS[kind]
    rows = sum(len(part) for part in parts)
    columns = parts[0].shape[1] // form.stored_bytes * form.stored_columns
    planes = _unfilled(kind, rows, columns, device)
    step = max(_MOST_WEIGHTS // columns // TILE, 1) * TILE
    at = 0
    for part in _even(parts):
        for start in range(0, len(part), step):
            some = part[start : start + step].to(device)
            _fill(planes, at, _READERS[kind](some.view(len(some), -1, form.stored_bytes)))
            at += len(some)
    return planes


def _even(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Parts that begin with a whole tile."""
    return [torch.cat(list(parts))] if any(len(part) % TILE for part in parts[:-1]) else parts


def _unfilled(kind: str, rows: int, columns: int, device: torch.device) -> Planes:
    form = KINDS[kind]
    units, tiles, each = columns // form.unit, -(-rows // TILE), 1 + (form.lows or form.halved)
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
        "scales": ((tiles, columns // form.stored_columns, TILE, each), wide),
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
    """Of a row, of 4 words a unit; the copy engine wants multiples of 16 bytes."""
    return -(-units * form.high // 4) * 8


def _high_shape(form: Kind, rows: int, units: int) -> tuple[int, ...]:
    if not form.high:
        return (0,)
    return (rows, high_stride(form, units)) if form.words == 4 else (-(-rows // TILE), units, TILE)


def _beside(high: Tensor, form: Kind, stride: int) -> Tensor:
    """High bits of placed codes [rows, units, words, 8] -> [rows, stride] int16."""
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
    """Rows from `at` on, a multiple of TILE."""
    form, num = KINDS[planes.kind], len(blocks.codes)
    codes = placed(blocks.codes, form)
    low = in_bits(codes & ((1 << form.low) - 1), form.low).view(torch.int32).flatten(2)
    tile = slice(at // TILE, at // TILE + -(-num // TILE))
    if form.words > 1:
        planes.low[at : at + num] = low
    else:
        planes.low[tile] = _tiled(low)
    if form.high and form.words == 4:
        planes.high[at : at + num] = _beside(codes >> form.low, form, planes.high.shape[1])
    elif form.high:
        planes.high[tile] = _tiled(in_bits(codes >> form.low, form.high).flatten(2).view(planes.high.dtype))
    if blocks.subs is not None:
        planes.subs[tile] = _tiled(blocks.subs).unflatten(1, blocks.subs.shape[1:]).transpose(2, 3)
    planes.scales[tile] = _tiled(blocks.scales).unflatten(1, blocks.scales.shape[1:]).transpose(2, 3)


def placed(codes: Tensor, form: Kind) -> Tensor:
    """[rows, columns] -> [rows, units, words, codes of a word]: of every 8 columns of a unit each word has
    some, so that a thread reads 8 numbers of x at once.

    Of 4 words, each half has a code of each 8 columns; the lower ones of its bytes are of the first 16.
    """
    if form.words == 4:
        eights = codes.view(len(codes), -1, form.unit // 16, 2, 4, 2)
        return eights.permute(0, 1, 4, 5, 3, 2).flatten(3)
    together = 8 // form.words
    apart: Tensor = codes.view(len(codes), -1, form.unit // 8, form.words, together)
    return apart.transpose(2, 3).flatten(3)


def in_bits(codes: Tensor, bits: int) -> Tensor:
    """The last axis as bits behind each other, [..., bytes]."""
    if bits == 8:
        return codes.contiguous()
    parts: Tensor = codes.unflatten(-1, (-1, 8 // bits))
    out = parts[..., 0].clone()
    for i in range(1, 8 // bits):
        out |= parts[..., i] << (i * bits)
    return out


def _tiled(numbers: Tensor) -> Tensor:
    """[rows, ...] -> [rows / TILE, all the rest, TILE]."""
    flat = numbers.flatten(1)
    if missing := -len(flat) % TILE:
        flat = torch.cat((flat, flat.new_zeros(missing, flat.shape[1])))
    tiles: Tensor = flat.unflatten(0, (-1, TILE))
    return tiles.transpose(1, 2)


def _halves(block: Tensor, *at: int) -> Tensor:
    """float16 numbers at these bytes of each block: [rows, blocks, how many]."""
    return torch.cat([block[..., i : i + 2].contiguous().view(torch.float16) for i in at], -1)


def _shifted(codes: Tensor, width: int, *shifts: int, bits: int) -> Tensor:
    """Runs of `width` bytes, each read once for every shift."""
    runs: Tensor = codes.unflatten(-1, (-1, 1, width))
    by = torch.tensor(shifts, dtype=torch.uint8, device=codes.device).view(-1, 1)
    return (runs >> by & ((1 << bits) - 1)).flatten(-3)


def _small(block: Tensor, *, lows: bool, fifth: bool) -> GGUFPlanes:
    """Q4_0, Q4_1, Q5_0 and Q5_1."""
    heads = _halves(block, 0, 2) if lows else _halves(block, 0)
    if lows:
        heads[..., 1].neg_()
    at = 4 if lows else 2
    codes = _shifted(block[..., at + 4 * fifth :], 16, 0, 4, bits=4)
    if fifth:
        bits = _shifted(block[..., at : at + 4], 1, *range(8), bits=1)
        codes |= bits << 4
    return GGUFPlanes(codes.flatten(1), heads)


def _q8(block: Tensor) -> GGUFPlanes:
    return GGUFPlanes((block[..., 2:] ^ 128).flatten(1), _halves(block, 0))


def _q2_k(block: Tensor) -> GGUFPlanes:
    codes = _shifted(block[..., 16:80], 32, 0, 2, 4, 6, bits=2)
    subs = block[..., :16].contiguous().view(torch.int8)
    return GGUFPlanes(codes.flatten(1), _halves(block, 80, 82), subs.flatten(1)[..., None])


def _q3_k(block: Tensor) -> GGUFPlanes:
    codes = _shifted(block[..., 32:96], 32, 0, 2, 4, 6, bits=2)
    codes |= _shifted(block[..., :32], 32, *range(8), bits=1) << 2
    low = _shifted(block[..., 96:104], 8, 0, 4, bits=4)
    high = _shifted(block[..., 104:108], 4, 0, 2, 4, 6, bits=2)
    subs = (low | high << 4).to(torch.int8) - 32
    return GGUFPlanes(codes.flatten(1), _halves(block, 108), subs.flatten(1)[..., None])


def _q4_q5_k(block: Tensor, *, fifth: bool) -> GGUFPlanes:
    codes = _shifted(block[..., 16 + 32 * fifth :], 32, 0, 4, bits=4)
    if fifth:
        codes |= _shifted(block[..., 16:48], 32, *range(8), bits=1) << 4
    scale, low, both = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = torch.cat((scale & 63, both & 15 | scale >> 2 & 48), -1)
    lows = torch.cat((low & 63, both >> 4 | low >> 2 & 48), -1)
    subs = torch.stack((scales, lows), -1).to(torch.int8)
    return GGUFPlanes(codes.flatten(1), _halves(block, 0, 2), subs.flatten(1, 2))


def _q6_k(block: Tensor) -> GGUFPlanes:
    codes = _shifted(block[..., :128], 64, 0, 4, bits=4)
    codes |= _shifted(block[..., 128:192], 32, 0, 2, 4, 6, bits=2) << 4
    subs = block[..., 192:208].contiguous().view(torch.int8)
    return GGUFPlanes(codes.flatten(1), _halves(block, 208, 208), subs.unflatten(-1, (8, 2)).flatten(1, 2))


def _iq4_xs(block: Tensor) -> GGUFPlanes:
    codes = _shifted(block[..., 8:], 16, 0, 4, bits=4)
    high = _shifted(block[..., 2:4], 1, 0, 2, 4, 6, bits=2)
    subs = (_shifted(block[..., 4:8], 1, 0, 4, bits=4) | high << 4).to(torch.int8) - 32
    return GGUFPlanes(codes.flatten(1), _halves(block, 0), subs.flatten(1)[..., None])


def _mxfp4(block: Tensor) -> GGUFPlanes:
    """Scales are exponents, with what bfloat16 has below its normal numbers."""
    exponents = block[..., :1].to(torch.int32)
    bits = torch.where(exponents > 0, exponents << 23, 1 << 22)
    codes = _shifted(block[..., 1:], 16, 0, 4, bits=4)
    return GGUFPlanes(codes.flatten(1), bits.view(torch.float32).to(torch.bfloat16))


_READERS: dict[str, Callable[[Tensor], GGUFPlanes]] = {
    "Q4_0": lambda block: _small(block, lows=False, fifth=False),
    "Q4_1": lambda block: _small(block, lows=True, fifth=False),
    "Q5_0": lambda block: _small(block, lows=False, fifth=True),
    "Q5_1": lambda block: _small(block, lows=True, fifth=True),
    "Q8_0": _q8,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda block: _q4_q5_k(block, fifth=False),
    "Q5_K": lambda block: _q4_q5_k(block, fifth=True),
    "Q6_K": _q6_k,
    "IQ4_NL": lambda block: _small(block, lows=False, fifth=False),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
