"""4-bit floats (e2m1), MXFP4 with a power-of-two scale per 32 of them, and NVFP4, in torch."""

import torch
from torch import Tensor

BLOCK = 32
"""Values per scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def in_halves(blocks: Tensor) -> Tensor:
    """Reorder the 32 4-bit values of each block [..., 16] uint8. Bytes of the input have two adjacent values,
    the first in the low nibble. Byte i of the result has value i in the low and 16 + i in the high nibble."""
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return numbers[..., :16] | numbers[..., 16:] << 4


def unpack(halves: Tensor, scales: Tensor) -> Tensor:
    """Dequantize blocks [..., blocks, 16] in the order of `in_halves` to float32 [..., 32 * blocks]. `scales`
    [..., blocks] are exponents of 2 plus 127."""
    numbers = _decode(torch.cat((halves & 15, halves >> 4), -1))
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)


def unpack_pairs(pairs: Tensor) -> Tensor:
    """Return 4-bit floats [..., inputs] from bytes [..., inputs / 2]; the low nibble is the first of two."""
    return _decode(split_pairs(pairs))


def split_pairs(pairs: Tensor) -> Tensor:
    """Return the 4-bit codes [..., inputs] of bytes [..., inputs / 2]; the low nibble is the first of two."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def read_nvfp4(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 4-bit codes [rows, columns] and the scales [rows, columns / 16] of weight rows [rows, bytes]
    of a GGUF file. A block has the e4m3 scales of 4 times 16 columns, and then the codes; of 16 columns the
    first 8 are in the low nibbles."""
    blocks = stored.view(len(stored), -1, 36)
    scales = blocks[..., :4].contiguous().view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    codes = blocks[..., 4:].unflatten(-1, (4, 8))
    return torch.cat((codes & 15, codes >> 4), -1).flatten(1), scales.flatten(1)


def _decode(codes: Tensor) -> Tensor:
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=codes.device)
    return values[codes.long()]
