"""Weights of 8 bits with a scale for each output: in plain torch, and as blocks that C multiplies."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.cpu.gguf import TYPES, group_rows, interleaves, pack
from quire.kernels.cpu.linear import BLOCK, Matrix

_KIND = "Q8_0"
MOST = 127
"""The largest code."""
_TINIEST = 2.0**-24
"""The smallest float16 above zero."""
_EXACT = 2.0**-9
"""How far from itself a scale may be as a float16: as far as a bfloat16 from what it stands for."""


class Int8Codes(NamedTuple):
    """A weight [..., outputs, inputs]: `codes` in int8, times a scale in float32 for each output."""

    codes: Tensor
    scales: Tensor
    """[..., outputs]"""

    def widened(self, dtype: torch.dtype) -> Tensor:
        wide = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        return torch.mul(self.codes, self.scales[..., None], out=wide)


def narrow(weight: Tensor) -> Int8Codes:
    """The nearest codes, with scales that are float16 numbers: blocks have those."""
    scales = (weight.abs().amax(-1).float() / MOST).clamp(_TINIEST, torch.finfo(torch.float16).max)
    scales = scales.half().float()
    codes = (weight / scales[..., None]).round_().clamp_(-MOST, MOST)
    return Int8Codes(codes.to(torch.int8), scales)


def round_rows(x: Tensor, static: Tensor | None = None) -> Int8Codes:
    """Rows of x [T, inputs], each by its largest number or all by one scale [1]."""
    wide = x.float()
    scales = (
        (wide.abs().amax(-1) / MOST).clamp(min=1e-10) if static is None else static.float().expand(len(x))
    )
    codes = (wide / scales[:, None]).round_().clamp_(-MOST, MOST)
    return Int8Codes(codes.to(torch.int8), scales.contiguous())


def product_reference(x: Tensor, weight: Int8Codes, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in float64, rounded once at the end."""
    wide = weight.codes.double() * weight.scales.double()[..., None]
    return F.linear(x.double(), wide, None if bias is None else bias.double()).to(x.dtype)


def fits_blocks(weight: Int8Codes) -> bool:
    """Whether the scales are as good in float16, and the columns are whole blocks. A scale of zeros may be
    anything."""
    used = weight.codes.any(-1)
    near = (weight.scales.half().float() - weight.scales).abs() <= _EXACT * weight.scales.abs()
    return weight.codes.shape[-1] % BLOCK == 0 and bool((near | ~used).all())


def as_blocks(weight: Int8Codes) -> Tensor:
    """For `matrices_of`: the codes and scales of ggml's Q8_0, as C reads them."""
    columns = weight.codes.shape[-1]
    scales = weight.scales.half().view(torch.uint8).view(-1, 1, 2).expand(-1, columns // BLOCK, -1)
    codes = weight.codes.view(torch.uint8).view(len(scales), -1, BLOCK)
    stored = torch.cat((scales, codes), 2).view(len(scales), -1)
    return pack(stored, _KIND, interleaved=interleaves()).data


def matrices_of(blocks: Tensor, num: int, rows: int, columns: int) -> list[Matrix]:
    """`num` matrices that lie one after the other in `as_blocks`. No two have rows in one group."""
    form, interleaved = TYPES[_KIND], interleaves()
    assert num == 1 or not interleaved or rows % group_rows() == 0
    row_bytes = columns // BLOCK * form.block_bytes
    return [
        Matrix(blocks[i * rows * row_bytes :], form.form, rows, columns, interleaved, row_bytes)
        for i in range(num)
    ]
