"""Floats of 4 bits (e2m1), 32 of which have a power of two for their scale: order and values, in torch."""

import torch
from torch import Tensor

BLOCK = 32
"""Numbers that have one scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def in_halves(blocks: Tensor) -> Tensor:
    """[..., 16] bytes, each of two neighbours, the first in its low half -> byte i of numbers i, 16 + i."""
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return numbers[..., :16] | numbers[..., 16:] << 4


def unpack(halves: Tensor, scales: Tensor) -> Tensor:
    """[..., blocks, 16] from `in_halves` and [..., blocks] exponents -> [..., 32 * blocks] float32."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=halves.device)
    numbers = values[torch.cat((halves & 15, halves >> 4), -1).long()]
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)
