"""GEMM in C (`csrc/linear.c`) with plain, fp8 and packed weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.cpu.native import Kernel

BLOCK = 32
"""Columns per block of a packed weight."""
FORMS = {torch.float32: 0, torch.bfloat16: 1}
"""Numbers of the formats of unquantized weights, equal to those in matrix.h."""
FP8_FORMS = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 10}
"""Numbers of the fp8 formats, which have scales."""
_ROUNDED_BYTES = 80
"""Bytes of a block of 32 columns of x in scratch memory, quantized for integer GEMM."""
PANEL = 6
"""Maximum rows of x that are interleaved (a panel) in scratch memory."""
_LANES = 16
"""Columns of a plain row are padded to a multiple of this in scratch memory."""


_linear = Kernel(
    "quire_linear",
    "out scratch x bias parts x_rows",
    "num_parts num_rows x_stride out_stride x_bf16 out_bf16 scratch_copies scratch_bytes",
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [rows, columns] in one of the formats of matrix.h."""

    data: Tensor
    form: int
    rows: int
    columns: int
    interleaved: bool
    row_bytes: int
    """Bytes per row; in the interleaved layout, the bytes of a group of rows divided by their number."""
    scales: Tensor | None = None
    """Scales of fp8 weights, [blocks of rows, blocks of columns] float32."""
    scale_block: tuple[int, int] = (1, 1)
    """Numbers of rows and columns of a block with one scale."""
    head_shift: int = 0
    """Binary logarithm of the number of successive blocks that share their scales and minima in memory."""

    @staticmethod
    def plain(weight: Tensor) -> "Matrix":
        assert weight.is_contiguous()
        rows, columns = weight.shape
        return Matrix(weight, FORMS[weight.dtype], rows, columns, False, columns * weight.element_size())

    @staticmethod
    def fp8(weight: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> "Matrix":
        """Return an fp8 matrix [rows, columns] with a scale per row, or per `block` of (rows, columns)."""
        assert weight.is_contiguous() and scales.dtype == torch.float32 and scales.is_contiguous()
        rows, columns = weight.shape
        high, wide = block or (1, columns)
        assert wide % BLOCK == 0 or wide >= columns, f"a scale of {wide} columns: not a multiple of {BLOCK}"
        assert scales.numel() == -(-rows // high) * -(-columns // wide)
        form = FP8_FORMS[weight.dtype]
        return Matrix(weight, form, rows, columns, False, columns, scales, (high, wide))

    @property
    def held(self) -> list[Tensor]:
        """Return the tensors whose addresses the result of `in_c` contains; they must exist as long as this
        result is in use."""
        return [self.data] if self.scales is None else [self.data, self.scales]

    @property
    def own_bytes(self) -> Tensor:
        """Return the bytes of the weight as uint8, without the padding after the last row."""
        return self.data.flatten().view(torch.uint8)[: self.rows * self.row_bytes]

    @property
    def prepared_bytes(self) -> int:
        """Return the number of bytes of a row of the input x after its conversion to the input format of the
        GEMM."""
        if self.interleaved:
            return self.columns // BLOCK * _ROUNDED_BYTES
        return -(-self.columns // _LANES) * _LANES * 4

    def in_c(self) -> list[int]:
        """Return the values of the fields of the C structure `Matrix` of matrix.h, in order."""
        sizes = self.form, self.rows, self.columns, self.interleaved, self.row_bytes
        scales = 0 if self.scales is None else self.scales.data_ptr()
        return [self.data.data_ptr(), *map(int, sizes), scales, *self.scale_block, self.head_shift]


class LinearProduct:
    """Linear layer x W^T + bias. W consists of `parts`, concatenated along the output; all of them are
    interleaved, or none. With `wide`, the output is float32 for any dtype of x.

    A row of the result is bitwise equal alone and in any batch, with any number of threads.
    """

    def __init__(self, parts: Sequence[Matrix], bias: Tensor | None = None, *, wide: bool = False) -> None:
        assert len({(part.columns, part.interleaved) for part in parts}) == 1
        self.parts = tuple(parts)
        self.wide = wide
        self._stored_bias = bias
        self.bias = None if bias is None else bias.float().contiguous()
        self._in_c = torch.tensor([part.in_c() for part in parts])
        self._held = [tensor for part in parts for tensor in part.held]
        self._size_in, self._size_out = parts[0].columns, sum(part.rows for part in parts)

    def refresh(self) -> None:
        """Update the float32 copy of the bias, after the bias passed to the constructor was changed in
        place."""
        if self.bias is not None and self._stored_bias is not None:
            self.bias.copy_(self._stored_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, size_out] for x [T, size_in] in float32 or bfloat16."""
        assert x.dtype in FORMS and x.stride(1) == 1 and x.shape[1] == self._size_in
        num_rows, is_bf16 = len(x), x.dtype == torch.bfloat16
        out = x.new_empty(num_rows, self._size_out, dtype=torch.float32 if self.wide else x.dtype)
        row_bytes = self.parts[0].prepared_bytes
        copies = torch.get_num_threads() if num_rows == 1 else 1
        kept_rows = max(num_rows, copies) + PANEL - 1
        scratch = torch.empty(kept_rows * row_bytes, dtype=torch.uint8)
        _linear(
            (out, scratch, x, self.bias, self._in_c, None),
            len(self.parts),
            num_rows,
            x.stride(0),
            self._size_out,
            is_bf16,
            out.dtype == torch.bfloat16,
            copies,
            row_bytes,
            held=self._held,
        )
        return out


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias in torch, in float64, rounded once at the end."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)
