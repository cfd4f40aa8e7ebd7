"""4-bit floats (e2m1), and MXFP4 with a power-of-two scale per 32 of them, in torch."""

import torch
from torch import Tensor

BLOCK = 32
"""Values per scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def in_halves(blocks: Tensor) -> Tensor:
    """Reorder blocks [..., 16] of bytes with two 4-bit values each, the first in the low nibble: from
    adjacent values to values i and 16 + i."""
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return numbers[..., :16] | numbers[..., 16:] << 4


def unpack(halves: Tensor, scales: Tensor) -> Tensor:
    """Dequantize blocks [..., blocks, 16] of `in_halves`, with exponents [..., blocks], to float32
    [..., 32 * blocks]."""
    numbers = _decode(torch.cat((halves & 15, halves >> 4), -1))
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)


def unpack_pairs(pairs: Tensor) -> Tensor:
    """Return the values [..., inputs] of bytes [..., inputs / 2], the first of a pair in the low nibble."""
    return _decode(torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2))


def _decode(codes: Tensor) -> Tensor:
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=codes.device)
    return values[codes.long()]
