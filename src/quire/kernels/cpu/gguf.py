"""GGUF weights on a CPU: formats, repacking and row lookup in C (`csrc/gguf*.c`)."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cpu import native
from quire.kernels.cpu.linear import BLOCK, Matrix, linear_reference
from quire.kernels.cpu.native import Kernel
from quire.kernels.gguf_grid import GRID_KINDS, resolve
from quire.kernels.reference.mxfp4 import read_nvfp4


class GGUFForm(NamedTuple):
    """Layout of a ggml type's weights in memory. `type` is the number of the ggml type in gguf_pack.c, and
    `form` the number of the format in matrix.h."""

    type: int
    form: int
    bits: int
    """Bits per code in memory. Types of 5 and 6 bits use 8."""
    head_bytes: int
    """Bytes of the scales and minima of 32 columns."""
    stored_bytes: int
    """Bytes of a block in the file, which has `stored_columns` columns."""
    stored_columns: int = BLOCK

    @property
    def block_bytes(self) -> int:
        return self.head_bytes + BLOCK * self.bits // 8


TYPES = {
    "Q4_0": GGUFForm(0, 2, 4, 2, 18),
    "Q4_1": GGUFForm(1, 3, 4, 4, 20),
    "Q5_0": GGUFForm(2, 4, 8, 2, 22),
    "Q5_1": GGUFForm(3, 6, 8, 8, 24),
    "Q8_0": GGUFForm(4, 4, 8, 2, 34),
    "Q2_K": GGUFForm(5, 7, 4, 16, 84, 256),
    "Q3_K": GGUFForm(6, 7, 4, 16, 110, 256),
    "Q4_K": GGUFForm(7, 5, 4, 8, 144, 256),
    "Q5_K": GGUFForm(8, 6, 8, 8, 176, 256),
    "Q6_K": GGUFForm(9, 8, 8, 8, 210, 256),
    "IQ4_XS": GGUFForm(10, 14, 4, 4, 136, 256),
    "IQ4_NL": GGUFForm(11, 14, 4, 4, 18),
    "MXFP4": GGUFForm(12, 11, 4, 1, 17),
    "IQ2_XXS": GGUFForm(13, 12, 4, 8, 66, 256),
    "IQ2_XS": GGUFForm(13, 12, 4, 8, 74, 256),
    "IQ2_S": GGUFForm(13, 12, 4, 8, 82, 256),
    "IQ3_XXS": GGUFForm(14, 13, 4, 4, 98, 256),
    "IQ3_S": GGUFForm(15, 5, 4, 8, 110, 256),
    "NVFP4": GGUFForm(16, 15, 4, 8, 36, 64),
}


_MOST_RESOLVED = 1 << 20
"""Maximum elements of a weight of type IQ2 or IQ3 that `pack` converts at a time."""
_SHARING_KINDS = ("Q4_0", "Q4_1")
"""ggml types of which blocks may share their scales and minima in memory: `shift_of` in matrix.h."""
_PADDING = 64
"""Bytes allocated after the last row, because a wide load may read beyond it."""


class _WeightArena:
    """Memory pool for many weights, because some allocators round each allocation up to two megabytes."""

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        if len(self._left) < num_bytes:
            self._left = torch.empty(max(num_bytes, self.CHUNK), dtype=torch.uint8)
        size = -(-num_bytes // _PADDING) * _PADDING
        taken, self._left = self._left[:num_bytes], self._left[size:]
        return taken


_arena = _WeightArena()
_pack = Kernel("quire_pack", "into stored", "type form rows columns interleaved stored_row_bytes head_shift")
_rows = Kernel("quire_rows", "out ids matrix", "num_ids out_bf16")


@functools.cache
def group_rows() -> int:
    """Return the number of weight rows that the layout of the integer GEMM stores interleaved; 0 if this CPU
    has no integer GEMM."""
    library = native.library()
    return 0 if library is None else int(library.quire_group())


def interleaves() -> bool:
    """Whether packed weights are interleaved on this CPU, for its integer GEMM. CPUs without an integer GEMM
    use the float GEMM, which reads whole rows."""
    return group_rows() > 0


def pack(stored: Tensor, kind: str, equal_heads: int = 1, *, interleaved: bool) -> Matrix:
    """Convert a weight [rows, bytes] of a GGUF file, of ggml type `kind`, to the format of the C kernels,
    either with `interleaved` groups of rows or with one row after the other. Each run of `equal_heads` blocks
    has the same scales and minima, which are stored once where the kernels support it."""
    form = TYPES[kind]
    columns = stored.shape[1] // form.stored_bytes * form.stored_columns
    if kind == "NVFP4":
        return pack_nvfp4(*read_nvfp4(stored), interleaved=interleaved)
    if kind in GRID_KINDS:
        step = max(1, _MOST_RESOLVED // columns)
        stored = torch.cat([resolve(part, kind) for part in stored.split(step)])
    head_shift = _head_shift(kind, equal_heads) if interleaved else 0
    return _pack_blocks(stored, form, columns, interleaved, head_shift)


def pack_nvfp4(numbers: Tensor, scales: Tensor, *, interleaved: bool) -> Matrix:
    """Convert an NVFP4 weight to the format of the C kernels: 4-bit floats [rows, columns], one per byte, and
    their scales [rows, columns / 16] float32. The number of columns is a multiple of 32."""
    first, second = numbers.unflatten(1, (-1, 2, 16)).unbind(2)
    heads = scales.unflatten(1, (-1, 2)) / 2  # the values in matrix.h are doubled
    blocks = torch.cat((heads.contiguous().view(torch.uint8), first | second << 4), -1)
    return _pack_blocks(blocks.flatten(1), TYPES["NVFP4"], numbers.shape[1], interleaved)


def _head_shift(kind: str, equal_heads: int) -> int:
    """Return the binary logarithm of the number of blocks that share their scales and minima in memory, given
    runs of `equal_heads` blocks in which they are equal."""
    library = native.library()
    if library is None or kind not in _SHARING_KINDS or not library.quire_shares_heads():
        return 0
    return next(shift for shift in (2, 1, 0) if equal_heads % (1 << shift) == 0)


def _pack_blocks(
    stored: Tensor, form: GGUFForm, columns: int, interleaved: bool, head_shift: int = 0
) -> Matrix:
    rows, blocks = len(stored), columns // BLOCK
    row_bytes = blocks * form.block_bytes - (blocks - (blocks >> head_shift)) * form.head_bytes
    kept_rows = -(-rows // group_rows()) * group_rows() if interleaved else rows
    packed = _arena.take(kept_rows * row_bytes + _PADDING)
    source = packed, stored.contiguous()
    _pack(source, form.type, form.form, rows, columns, interleaved, stored.shape[1], head_shift)
    return Matrix(packed, form.form, rows, columns, interleaved, row_bytes, head_shift=head_shift)


class GGUFRows:
    """Lookup of dequantized rows of a matrix, for embeddings."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self._in_c = torch.tensor(matrix.in_c())

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dequantized rows `ids` [T] int64 of the matrix: [T, columns]."""
        assert ids.dtype == torch.int64 and ids.is_contiguous()
        out = torch.empty(len(ids), self.matrix.columns, dtype=dtype)
        _rows((out, ids, self._in_c), len(ids), dtype == torch.bfloat16, held=self.matrix.held)
        return out


def unpack_reference(stored: Tensor, kind: str) -> Tensor:
    """Dequantize a weight [rows, bytes] of a GGUF file, of ggml type `kind`, to [rows, columns] float32."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(stored.numpy(), GGMLQuantizationType[kind]))


def product_reference(x: Tensor, parts: Sequence[tuple[Tensor, str]], bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias in torch. W are the rows of all `parts`: (weight of a GGUF file, ggml type)."""
    return linear_reference(x, torch.cat([unpack_reference(*part) for part in parts]), bias)
