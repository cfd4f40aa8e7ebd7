"""Blocks of IQ2 and IQ3 of GGUF files: an index into a grid of 4 or 8 magnitudes, their signs, and scales.

The grids are those of the gguf package.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_COLUMNS = 256
"""Columns of a block of these types."""


class GridKind(NamedTuple):
    """Format of a ggml type of IQ2 or IQ3. A weight is factor * scale * sub-scale * magnitude, and has a
    4-bit code: bits 0 to 2 are the index of the magnitude, and bit 3 is the sign."""

    stored_bytes: int
    unit: int
    """Number of consecutive columns with the same sub-scale."""
    factor: float
    magnitudes: tuple[int, ...]


_IQ2, _IQ3 = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
GRID_KINDS = {
    "IQ2_XXS": GridKind(66, 32, 1 / 8, _IQ2),
    "IQ2_XS": GridKind(74, 16, 1 / 8, _IQ2),
    "IQ2_S": GridKind(82, 16, 1 / 8, _IQ2),
    "IQ3_XXS": GridKind(98, 32, 1 / 4, _IQ3),
    "IQ3_S": GridKind(110, 32, 1.0, tuple(range(1, 16, 2))),
}


class GridBlocks(NamedTuple):
    """Codes and scales of some rows of a weight."""

    codes: Tensor
    """[rows, columns] uint8: the index of a magnitude, plus 8 if the weight is negative"""
    scales: Tensor
    """[rows, columns / 256] float16"""
    subs: Tensor
    """[rows, columns / unit] int8: odd numbers up to 31"""


@functools.cache
def _grid(kind: str) -> Tensor:
    """Return the grid of a ggml type of IQ2 or IQ3, [entries, 4 or 8] uint8. An entry has the magnitudes of 4
    or 8 consecutive weights, as indices into the magnitudes of the type."""
    import gguf.quants

    form = getattr(gguf.quants, kind)
    form.init_grid()
    values = form.grid.reshape(form.grid_shape).astype(np.int64)
    assert tuple(form.grid_map) == GRID_KINDS[kind].magnitudes
    return torch.from_numpy(np.searchsorted(form.grid_map, values).astype(np.uint8))


def _bits(numbers: Tensor, width: int, count: int) -> Tensor:
    """Split numbers [..., n] into [..., n, count] numbers of `width` bits each, the lowest bits first."""
    shifts = torch.arange(0, width * count, width, dtype=numbers.dtype, device=numbers.device)
    return numbers[..., None] >> shifts & ((1 << width) - 1)


def _even_signs(numbers: Tensor) -> Tensor:
    """Return the sign bits [..., n, 8] of 8 columns for each 7-bit number of [..., n]. The eighth sign makes
    the number of negative columns even."""
    signs = _bits(numbers, 1, 7)
    return torch.cat((signs, signs.sum(-1, keepdim=True) & 1), -1)


def _words(block: Tensor) -> Tensor:
    # A copy is aligned, which a part of a single block is not.
    return block.clone(memory_format=torch.contiguous_format).view(torch.int32).long() & 0xFFFFFFFF


def _iq2_xxs(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = _words(block[..., 2:]).unflatten(-1, (8, 2)).unbind(-1)
    return _bits(first, 8, 4), _even_signs(_bits(second, 7, 4)), second >> 28


def _iq2_xs(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers = block[..., 2:66].contiguous().view(torch.int16).long() & 0xFFFF
    return numbers & 511, _even_signs(numbers >> 9), _bits(block[..., 66:].long(), 4, 2)


def _iq2_s(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, signs, high, scales = block.long()[..., 2:].split((32, 32, 8, 8), -1)
    return low | _bits(high, 2, 4).flatten(-2) << 8, _bits(signs, 1, 8), _bits(scales, 4, 2)


def _iq3_xxs(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    words = _words(block[..., 66:])
    return block[..., 2:66].long(), _even_signs(_bits(words, 7, 4)), words >> 28


def _iq3_s(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high, signs, scales = block.long()[..., 2:].split((64, 8, 32, 4), -1)
    return low | _bits(high, 1, 8).flatten(-2) << 8, _bits(signs, 1, 8), _bits(scales, 4, 2)


_READERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
"""For each ggml type, the function that reads blocks [rows, blocks, bytes]. It returns grid indices, sign
bits, and numbers n that stand for the sub-scales 2 n + 1."""


def read_grid_blocks(stored: Tensor, kind: str) -> GridBlocks:
    """Return the codes and scales of weight rows [rows, bytes], as stored in a GGUF file."""
    block = stored.view(len(stored), -1, GRID_KINDS[kind].stored_bytes)
    indices, signs, subs = _READERS[kind](block)
    magnitudes = _grid(kind).to(stored.device)[indices.flatten(1)].flatten(1)
    codes = magnitudes | (signs.flatten(1) << 3).to(torch.uint8)
    scales = block[..., :2].contiguous().view(torch.float16)[..., 0]
    return GridBlocks(codes, scales, (2 * subs.flatten(1) + 1).to(torch.int8))


def resolve(stored: Tensor, kind: str) -> Tensor:
    """Convert weight rows [rows, bytes] of a GGUF file to blocks that gguf_pack.c reads: [rows, bytes] uint8
    with two floats and 16 bytes of codes per 32 columns. The floats are the scales of the first and last 16
    columns. For IQ3_S, whose values are odd numbers, they are a scale and a minimum."""
    form, (codes, scales, subs) = GRID_KINDS[kind], read_grid_blocks(stored, kind)
    wide = scales.float().repeat_interleave(_COLUMNS // form.unit, 1) * subs.float() * form.factor
    heads = wide.unflatten(1, (-1, 2)) if form.unit == 16 else torch.stack((wide, wide), -1)
    if kind == "IQ3_S":
        magnitudes = 2 * (codes & 7) + 1
        codes = torch.where(codes < 8, 15 + magnitudes, 15 - magnitudes) >> 1
        heads = torch.stack((2 * wide, -15 * wide), -1)
    first, second = codes.unflatten(1, (-1, 2, 16)).unbind(2)
    blocks = torch.cat((heads.contiguous().view(torch.uint8), first | second << 4), -1)
    return blocks.flatten(1)
