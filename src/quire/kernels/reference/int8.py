"""int8 weights with a scale per output: in torch, and as blocks for the C kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cpu.gguf import TYPES, group_rows, interleaves, pack
from quire.kernels.cpu.linear import BLOCK, Matrix

_KIND = "Q8_0"
MAX_CODE = 127
"""Largest code of an int8 weight."""
_MIN_SCALE = 2.0**-24
"""Smallest positive float16."""
_MAX_SCALE_ERROR = 2.0**-9
"""Maximum relative error of a scale in float16, equal to the rounding error of bfloat16."""


class Int8Codes(NamedTuple):
    """A matrix [..., outputs, inputs]: int8 `codes` of this shape times a float32 scale per output."""

    codes: Tensor
    scales: Tensor
    """[..., outputs]"""

    def widened(self, dtype: torch.dtype) -> Tensor:
        wide = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        return torch.mul(self.codes, self.scales[..., None], out=wide)


def quantize(weight: Tensor) -> Int8Codes:
    """Quantize a weight [..., outputs, inputs] to the nearest int8 values. Scales are rounded to float16, in
    which `as_blocks` stores them."""
    scales = (weight.abs().amax(-1).float() / MAX_CODE).clamp(_MIN_SCALE, torch.finfo(torch.float16).max)
    scales = scales.half().float()
    codes = (weight / scales[..., None]).round_().clamp_(-MAX_CODE, MAX_CODE)
    return Int8Codes(codes.to(torch.int8), scales)


def round_rows(x: Tensor, static: Tensor | None = None) -> Int8Codes:
    """Quantize activations x [T, inputs] with a dynamic scale per row, or with the `static` scale [1]."""
    wide = x.float()
    scales = (
        (wide.abs().amax(-1) / MAX_CODE).clamp(min=1e-10) if static is None else static.float().expand(len(x))
    )
    codes = (wide / scales[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE)
    return Int8Codes(codes.to(torch.int8), scales.contiguous())


def fits_blocks(weight: Int8Codes) -> bool:
    """Whether `as_blocks` supports the weight: its columns are whole blocks, and float16 is precise enough
    for its scales, except those of rows of zeros."""
    used = weight.codes.any(-1)
    near = (weight.scales.half().float() - weight.scales).abs() <= _MAX_SCALE_ERROR * weight.scales.abs()
    return weight.codes.shape[-1] % BLOCK == 0 and bool((near | ~used).all())


def as_blocks(weight: Int8Codes) -> Tensor:
    """Convert a weight [..., outputs, inputs] to packed Q8_0 blocks of the C kernels, a uint8 tensor that
    `matrices_of` divides into matrices."""
    columns = weight.codes.shape[-1]
    scales = weight.scales.half().view(torch.uint8).view(-1, 1, 2).expand(-1, columns // BLOCK, -1)
    codes = weight.codes.view(torch.uint8).view(len(scales), -1, BLOCK)
    stored = torch.cat((scales, codes), 2).view(len(scales), -1)
    return pack(stored, _KIND, interleaved=interleaves()).data


def matrices_of(blocks: Tensor, num: int, rows: int, columns: int) -> list[Matrix]:
    """Return the `num` matrices [rows, columns] that `blocks`, a result of `as_blocks`, contains one after
    the other. The number of rows must be a multiple of that of an interleaved group, so that no group has
    rows of two matrices."""
    form, interleaved = TYPES[_KIND], interleaves()
    assert num == 1 or not interleaved or rows % group_rows() == 0
    row_bytes = columns // BLOCK * form.block_bytes
    return [
        Matrix(blocks[i * rows * row_bytes :], form.form, rows, columns, interleaved, row_bytes)
        for i in range(num)
    ]
