"""Weights in eight bits (float8_e4m3fn) with scales: what they are, and their products in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn
LIMIT = 448.0
"""The largest number of e4m3."""
BLOCK = 128
"""Outputs and inputs of a weight that share a scale; numbers of a row of x that do."""
_LEAST = 1e-10
"""Of the largest number of a row: what is all zero needs a scale, too."""


class Scaled(NamedTuple):
    """Matrices in e4m3 and what to multiply them with."""

    data: Tensor
    """[..., outputs, inputs]"""
    scale: Tensor
    """float32: one for each output [..., outputs], or one for each block of 128 outputs and 128 inputs
    [..., blocks of outputs, blocks of inputs]."""

    @property
    def is_blocked(self) -> bool:
        return self.scale.ndim == self.data.ndim


def narrowed(weight: Tensor) -> Scaled:
    """A weight [..., outputs, inputs] in e4m3, with a scale for each output."""
    scale = weight.abs().amax(-1).float().clamp(min=_LEAST) / LIMIT
    return Scaled((weight / scale[..., None]).clamp(-LIMIT, LIMIT).to(E4M3), scale)


def widened(weight: Scaled, dtype: torch.dtype) -> Tensor:
    data, scale = weight
    if weight.is_blocked:
        scale = scale.repeat_interleave(BLOCK, -2)[..., : data.shape[-2], :]
        scale = scale.repeat_interleave(BLOCK, -1)[..., : data.shape[-1]]
        return (data.float() * scale).to(dtype)
    return (data.float() * scale[..., None]).to(dtype)


def quantize_reference(x: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """[T, n] -> e4m3 and scales: [T], or [T, n / 128] of groups of 128 numbers."""
    num, size = x.shape
    width = BLOCK if grouped else size
    wide = F.pad(x.float(), (0, -size % width)).view(num, -1, width)
    scale = wide.abs().amax(-1).clamp(min=_LEAST) / LIMIT
    narrow = (wide / scale[..., None]).clamp(-LIMIT, LIMIT).view(num, -1)[:, :size].to(E4M3)
    return narrow.contiguous(), scale if grouped else scale[:, 0]


def linear(x: Tensor, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """x W^T + b; x keeps its type."""
    return F.linear(x, widened(weight, x.dtype), bias)


def linear_reference(x: Tensor, weight: Scaled, bias: Tensor | None = None, *, quantized: bool) -> Tensor:
    """The same in float64; `quantized`: of x in e4m3, too."""
    wide = x.double()
    if quantized:
        narrow, scale = quantize_reference(x, grouped=weight.is_blocked)
        scale = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]] if weight.is_blocked else scale[:, None]
        wide = narrow.double() * scale.double()
    return F.linear(wide, widened(weight, torch.float64), None if bias is None else bias.double()).to(x.dtype)
