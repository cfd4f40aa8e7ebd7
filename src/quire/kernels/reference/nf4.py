"""NF4 and FP4: 4-bit weights that index a table, with a scale per block of a row."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Columns per scale."""


class Halves(NamedTuple):
    """A weight [outputs, inputs] in the layout of the GPU kernels. Byte i of a row of `codes` has column i in
    its low nibble and column i + inputs / 2 in its high nibble."""

    codes: Tensor
    """[outputs, inputs / 2] uint8"""
    scales: Tensor
    """[outputs, inputs / BLOCK] float32"""
    table: Tensor
    """[16] float32"""

    def widened(self, dtype: torch.dtype) -> Tensor:
        return scaled(self.table[split(self.codes).long()], self.scales).to(dtype)


def split(codes: Tensor) -> Tensor:
    """Unpack `Halves.codes` [outputs, inputs / 2] to [outputs, inputs], one code per element."""
    return torch.cat((codes & 15, codes >> 4), 1)


def scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply values [outputs, inputs] by the scales of their blocks, [outputs, inputs / BLOCK]."""
    blocks = values.view(len(values), -1, BLOCK)
    return (blocks * scales[..., None]).view_as(values)


def in_halves(codes: Tensor) -> Tensor:
    """Pack codes [outputs, inputs], one per element, to `Halves.codes` [outputs, inputs / 2]."""
    low, high = codes.chunk(2, 1)
    return low | high << 4
