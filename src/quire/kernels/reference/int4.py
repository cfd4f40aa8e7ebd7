"""Integer weights of 4 or 8 bits with a scale and a zero point per group of inputs, and their C format."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cpu.linear import BLOCK, FORMS
from quire.kernels.cpu.native import Kernel

_MAX_SCALE_ERROR = 2**-10
"""Maximum relative error of a scale in float16."""
_gather = Kernel("quire_gather", "out x order", "num_rows columns x_stride bf16")


class Int4Codes(NamedTuple):
    """A quantized weight [outputs, inputs] with the values (code - zero) * scale. The consecutive inputs of a
    group share a scale and a zero point."""

    codes: Tensor
    """[outputs, inputs] uint8"""
    scales: Tensor
    """[outputs, groups] float32"""
    zeros: Tensor
    """[outputs, groups] int32, or float32 if they are fractional"""
    bits: int

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def contiguous(self) -> "Int4Codes":
        return Int4Codes(
            self.codes.contiguous(), self.scales.contiguous(), self.zeros.contiguous(), self.bits
        )

    def values(self) -> Tensor:
        """Return the dequantized weight [outputs, inputs] float32."""
        zeros, scales = (x.repeat_interleave(self.group, 1) for x in (self.zeros, self.scales))
        return (self.codes - zeros) * scales


def split_zeros(weight: Int4Codes, *, on_gpu: bool) -> tuple[Int4Codes, Tensor | None]:
    """Return the weight with zero points that the kernels of the device support, and a correction [outputs,
    groups] to add to all weights of a group: (supported zero - zero) * scale, or None if it is 0 everywhere.
    GPU kernels need integers in the range of codes, 8-bit CPU kernels the middle of this range."""
    codes, scales, zeros, bits = weight
    middle = 1 << bits - 1
    if on_gpu:
        fitting = zeros if not zeros.is_floating_point() else zeros.round().clamp(0, 2 * middle - 1)
    else:
        fitting = zeros if bits == 4 else torch.full_like(zeros, middle)
    if fitting is zeros or torch.equal(fitting, zeros):
        return weight._replace(zeros=fitting if bits == 4 and not on_gpu else fitting.to(torch.int32)), None
    return Int4Codes(codes, scales, fitting.to(torch.int32), bits), (fitting - zeros) * scales


def as_blocks(weight: Int4Codes) -> tuple[Tensor, str, int] | None:
    """Convert the weight to GGUF blocks. Return the bytes [outputs, bytes], the name of the ggml type, and
    the number of blocks in a group, which have equal scales. Return None if no type has fitting groups and
    enough precision."""
    outputs, inputs = weight.codes.shape
    middle = 1 << weight.bits - 1
    is_even = bool((weight.zeros == middle).all())
    if inputs % BLOCK or weight.group % BLOCK or weight.bits == 8 and not is_even:
        return None
    blocks_of_group = weight.group // BLOCK
    scales, zeros = (x.repeat_interleave(blocks_of_group, 1) for x in (weight.scales, weight.zeros))
    half = scales.half()
    if not bool(((half.float() - scales).abs() <= scales.abs() * _MAX_SCALE_ERROR).all()):
        return None
    heads = [half] if is_even else [half, (-zeros * scales).half()]
    codes = weight.codes.view(outputs, -1, BLOCK)
    if weight.bits == 8:
        kind, codes = "Q8_0", codes ^ middle
    else:
        kind, codes = "Q4_0" if is_even else "Q4_1", codes[..., :16] | codes[..., 16:] << 4
    blocks = [head[..., None].contiguous().view(torch.uint8) for head in heads]
    return torch.cat((*blocks, codes), 2).view(outputs, -1), kind, blocks_of_group


class Gather:
    """Permutation of the columns of x, in C: column i of the result is column order[i] of x."""

    def __init__(self, order: Tensor) -> None:
        self.order = order.to(torch.int32).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the permuted x [T, inputs], float32 or bfloat16."""
        assert x.dtype in FORMS and x.stride(1) == 1
        out = torch.empty(len(x), len(self.order), dtype=x.dtype)
        _gather((out, x, self.order), *out.shape, x.stride(0), x.dtype == torch.bfloat16)
        return out
