"""Weights of 4 bits that stand for numbers of a table, with a scale for each block of a row."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
"""Columns with one scale."""


class Halves(NamedTuple):
    """A weight [outputs, inputs] as the GPU reads it: byte i of a row of `codes` has column i in its low half
    and column i + inputs / 2 in its high half."""

    codes: Tensor
    """[outputs, inputs / 2] uint8"""
    scales: Tensor
    """[outputs, inputs / BLOCK] float32"""
    table: Tensor
    """[16] float32"""

    def widened(self, dtype: torch.dtype) -> Tensor:
        return scaled(self.table[split(self.codes).long()], self.scales).to(dtype)


def split(codes: Tensor) -> Tensor:
    """The codes of `Halves`, one by one."""
    return torch.cat((codes & 15, codes >> 4), 1)


def scaled(values: Tensor, scales: Tensor) -> Tensor:
    """[outputs, inputs] times the scale of each block."""
    blocks = values.view(len(values), -1, BLOCK)
    return (blocks * scales[..., None]).view_as(values)


def in_halves(codes: Tensor) -> Tensor:
    """Codes one by one [outputs, inputs] -> those of `Halves`."""
    low, high = codes.chunk(2, 1)
    return low | high << 4


def product_reference(x: Tensor, weight: Halves, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in float64, rounded once at the end."""
    wide = weight.widened(torch.float64)
    return F.linear(x.double(), wide, None if bias is None else bias.double()).to(x.dtype)
