"""fp8 weights (float8_e4m3fn) with scales: quantization and GEMM in torch."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn
LIMIT = 448.0
"""Largest value of float8_e4m3fn."""
BLOCK = 128
"""Outputs and inputs per scale of a blocked weight, and values per scale of a row of x."""
_LEAST = 1e-10
"""Lower limit of the absolute maximum of a row, so that the scale of a row of zeros is not 0."""


class Scaled(NamedTuple):
    """Matrices in e4m3 with their scales."""

    data: Tensor
    """[..., outputs, inputs]"""
    scale: Tensor
    """float32, one per output [..., outputs], or one per block of 128 outputs and 128 inputs
    [..., blocks of outputs, blocks of inputs]."""

    @property
    def is_blocked(self) -> bool:
        return self.scale.ndim == self.data.ndim


def quantize_weight(weight: Tensor) -> Scaled:
    """Quantize a weight [..., outputs, inputs] to e4m3 with a scale per output."""
    scale = weight.abs().amax(-1).float().clamp(min=_LEAST) / LIMIT
    return Scaled((weight / scale[..., None]).clamp(-LIMIT, LIMIT).to(E4M3), scale)


def dequantize(weight: Scaled, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [..., outputs, inputs] in `dtype`."""
    data, scale = weight
    if weight.is_blocked:
        scale = scale.repeat_interleave(BLOCK, -2)[..., : data.shape[-2], :]
        scale = scale.repeat_interleave(BLOCK, -1)[..., : data.shape[-1]]
        return (data.float() * scale).to(dtype)
    return (data.float() * scale[..., None]).to(dtype)


def quantize_reference(x: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """Return x [T, n] in e4m3 and its float32 scales: [T], or [T, n / 128] if `grouped` by 128 values."""
    num, size = x.shape
    width = BLOCK if grouped else size
    wide = F.pad(x.float(), (0, -size % width)).view(num, -1, width)
    scale = wide.abs().amax(-1).clamp(min=_LEAST) / LIMIT
    narrow = (wide / scale[..., None]).clamp(-LIMIT, LIMIT).view(num, -1)[:, :size].to(E4M3)
    return narrow.contiguous(), scale if grouped else scale[:, 0]


def linear(x: Tensor, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b with the dequantized weight, for x [T, inputs] and in its dtype."""
    return F.linear(x, dequantize(weight, x.dtype), bias)


def linear_reference(x: Tensor, weight: Scaled, bias: Tensor | None = None, *, quantized: bool) -> Tensor:
    """Compute x W^T + b in float64, for x [T, inputs]; with `quantized`, x is rounded to e4m3 first."""
    wide = x.double()
    if quantized:
        narrow, scale = quantize_reference(x, grouped=weight.is_blocked)
        scale = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]] if weight.is_blocked else scale[:, None]
        wide = narrow.double() * scale.double()
    return F.linear(wide, dequantize(weight, torch.float64), None if bias is None else bias.double()).to(
        x.dtype
    )
