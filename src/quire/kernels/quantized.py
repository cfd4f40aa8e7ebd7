"""Products with packed weights in C (`csrc/quantized.c`), their layout, and the reference in torch."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.native import bind

GROUP = 8
"""Rows that lie side by side."""
BLOCK = 32
"""Columns that share a scale."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A ggml type: a block is a scale, perhaps a minimum (float16 each), and 32 codes of some bits."""

    number: int
    """As in quantized.c."""
    bits: int
    minimum: bool

    @property
    def head_bytes(self) -> int:
        return 4 if self.minimum else 2

    @property
    def block_bytes(self) -> int:
        return self.head_bytes + BLOCK * self.bits // 8


PACKINGS = {
    "Q4_0": Packing(0, bits=4, minimum=False),
    "Q4_1": Packing(1, bits=4, minimum=True),
    "Q8_0": Packing(2, bits=8, minimum=False),
}


def pack(stored: Tensor, packing: Packing) -> Tensor:
    """[rows, bytes] as in a GGUF file -> [rows / 8, blocks, bytes], for each group and block:
    8 scales, 8 minima, then 4 codes of each of the 8 rows in turn."""
    rows = len(stored)
    blocks = stored.view(rows // GROUP, GROUP, -1, packing.block_bytes).transpose(1, 2)
    head = blocks[..., : packing.head_bytes].unflatten(-1, (-1, 2)).transpose(2, 3).flatten(2)
    codes = blocks[..., packing.head_bytes :].unflatten(-1, (-1, 4)).transpose(2, 3).flatten(2)
    return torch.cat((head, codes), -1)


def unpack_rows(packed: Tensor, ids: Tensor, packing: Packing) -> Tensor:
    """Rows `ids` of the matrix as float32."""
    heads, codes = packed.split(
        [packing.head_bytes * GROUP, packed.shape[-1] - packing.head_bytes * GROUP], -1
    )
    group, row = ids // GROUP, ids % GROUP
    # [groups, blocks, scale or minimum, rows, 2] and [groups, blocks, steps, rows, 4]
    head = heads.unflatten(-1, (-1, GROUP, 2))[group, :, :, row].contiguous().view(torch.float16).float()
    code = codes.unflatten(-1, (-1, GROUP, 4))[group, :, :, row].flatten(2)
    if packing.bits == 8:
        values = code.view(torch.int8).float()
    else:
        values = torch.cat((code & 15, code >> 4), -1).float() - (0 if packing.minimum else 8)
    values = values * head[:, :, 0]
    return (values + head[:, :, 1] if packing.minimum else values).flatten(1)


@functools.cache
def _linear() -> Callable[..., None]:
    pointers, sizes = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 3
    return bind("quire_linear", *pointers, *sizes, ctypes.c_int32, ctypes.c_int32)


def linear(x: Tensor, packed: Tensor, packing: Packing) -> Tensor:
    """[T, size_in] times the packed matrix, as float32; x is rounded to 8 bits in blocks of 32."""
    x = x.float().contiguous()
    size_out = len(packed) * GROUP
    out = torch.empty(len(x), size_out)
    _linear()(
        out.data_ptr(),
        x.data_ptr(),
        packed.data_ptr(),
        len(x),
        x.shape[1],
        size_out,
        packing.number,
        torch.get_num_threads(),
    )
    return out


def linear_reference(x: Tensor, packed: Tensor, packing: Packing) -> Tensor:
    """The same in torch, with the same rounding of x."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(scale > 0, blocks / scale, 0).round() * scale
    rows = unpack_rows(packed, torch.arange(len(packed) * GROUP), packing)
    return rounded.flatten(1) @ rows.T
