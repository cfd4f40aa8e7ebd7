"""Weights from a GGUF file: Hugging Face names, values dequantized or left in quantized blocks."""

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.checkpoint.gguf import GGUFFile, GGUFTensor
from quire.checkpoint.model import Checkpoint
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.gguf_views import View, views_of
from quire.loader.source import Source, put
from quire.quant.format import Format
from quire.quant.gguf import BLOCKS, GGUFFormat, Stored

# Weights dequantized at a time, so that a large embedding never exists in float32 as a whole.
_CHUNK_WEIGHTS = 1 << 24
_ALL = slice(None)
_KEPT_BYTES = 8 << 20
"""Bytes of the file that may stay in memory while it is read."""


class GGUFSource(Source):
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self._file = GGUFFile(checkpoint.path)
        _check_scales(self._file)
        self._views = views_of(self._file, checkpoint.facts)
        self._num_read = 0

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {
            name: _packed_shape(view.tensor) if _takes_bytes(targets.get(name)) else view.tensor.shape
            for name, view in self._views.items()
        }

    def format(self, plain: Format) -> Format:
        stored: dict[str, Stored] = {
            name: (view.tensor.type, *view.tensor.shape) for name, view in self._views.items()
        }
        return GGUFFormat(stored, plain)

    def _packed(self, view: View, axis: int = 0, span: slice = _ALL) -> NDArray[np.uint8]:
        """Return the stored bytes of a tensor as [..., bytes of a row]; a vector has a row per element. Only
        the range `span` along `axis` is returned."""
        shape, raw = _packed_shape(view.tensor), self._file.raw(view.tensor.name)
        before = (_ALL,) * axis
        if view.rows is None:
            return raw.reshape(shape)[(*before, span)]
        raw, rows = raw.reshape(-1, shape[-1]), view.rows.reshape(shape[:-1])
        return raw[rows[(*before, span)]] if axis < rows.ndim else raw[:, span][rows]

    def fill(self, target: Target) -> None:
        """Fill a target with dequantized values, or with the bytes of the file if the target is uint8."""
        view, into = self._views[target.name], target.tensor
        self._num_read += view.tensor.nbytes
        if self._num_read > _KEPT_BYTES:
            self._num_read = 0
            self._file.forget()
        if view.values is not None:
            return put(torch.from_numpy(view.values(self._dequantize)), target)
        if not _takes_bytes(target):
            return self._unpack(target)
        with warnings.catch_warnings(action="ignore"):  # the array is read-only, and never written to
            into.data = torch.from_numpy(self._shard_bytes(target))

    def _shard_bytes(self, target: Target) -> NDArray[np.uint8]:
        """Return the stored bytes of the target's shard, which may consist of several ranges of rows or
        columns; padding is zero bytes."""
        view, axis = self._views[target.name], target.axis
        if axis is None or target.is_whole:
            return self._packed(view)
        parts = []
        for span, num_zeros in target.spans():
            parts.append(packed := self._packed(view, axis, span))
            if num_zeros:
                shape = (*packed.shape[:axis], num_zeros, *packed.shape[axis + 1 :])
                parts.append(np.zeros(shape, np.uint8))
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis)

    def _unpack(self, target: Target) -> None:
        """Fill the target with the dequantized values of its shard, some rows at a time. For a shard of
        columns, whole blocks are dequantized."""
        view, into, axis = self._views[target.name], target.tensor, target.axis
        tensor = view.tensor
        if axis is None or target.is_whole:
            self._unpack_rows(tensor, self._packed(view), _ALL, into)
        elif axis < len(tensor.shape) - 1 or axis == 0:
            for span, part in target.slices():
                self._unpack_rows(tensor, self._packed(view, axis, span), _ALL, part)
        else:
            columns, num_bytes = BLOCKS[tensor.type]
            for span, part in target.slices():
                first, last = span.start // columns, -(-span.stop // columns)
                blocks = self._packed(view, axis, slice(first * num_bytes, last * num_bytes))
                inside = slice(span.start - first * columns, span.stop - first * columns)
                self._unpack_rows(tensor, blocks, inside, part)

    def _dequantize(self, tensor: GGUFTensor) -> NDArray[np.float32]:
        """Return all values of a stored tensor."""
        values = torch.empty(tensor.shape)
        self._unpack_rows(tensor, self._packed(View(tensor)), _ALL, values)
        return values.numpy()

    def _unpack_rows(
        self, tensor: GGUFTensor, packed: NDArray[np.uint8], columns: slice, into: Tensor
    ) -> None:
        step = max(1, _CHUNK_WEIGHTS // max(1, into[0].numel()))
        for start in range(0, len(into), step):
            try:
                values = _dequantized(packed[start : start + step], tensor.type)
            except NotImplementedError as error:
                raise ConfigError(
                    f"{self._file.path}: {tensor.name} is {tensor.type}, which cannot be dequantized yet; "
                    "use a file in another quantization, such as Q8_0 or Q4_K_M"
                ) from error
            piece, values = into[start : start + step], values[..., columns]
            piece.copy_(torch.from_numpy(np.require(values, requirements=["C", "W"])).view(piece.shape))


def _check_scales(file: GGUFFile) -> None:
    """Raise a ConfigError for NVFP4 tensors with a scale in another tensor, which no kernel applies."""
    for name, tensor in file.tensors.items():
        scale = f"{name.removesuffix('.weight')}.scale"
        is_scaled = tensor.type == "NVFP4" and scale in file.tensors
        if is_scaled and (file.raw(scale).view(np.float32) != 1).any():
            raise ConfigError(
                f"{file.path}: {name} is NVFP4 with a scale in {scale}, which is not supported in GGUF "
                "files; use the NVFP4 checkpoint in safetensors, or a file in another quantization"
            )


def _dequantized(packed: NDArray[np.uint8], stored_type: str) -> NDArray[np.float32]:
    """Return the dequantized values of rows of the ggml type `stored_type`. F32 rows are only viewed, without
    an import of the package gguf, which takes 0.07 s."""
    if stored_type == "F32":
        return packed.view(np.float32)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(packed, GGMLQuantizationType[stored_type])


def _packed_shape(tensor: GGUFTensor) -> tuple[int, ...]:
    """Return the shape of a tensor as uint8, whose last dimension has the bytes of a row. A tensor with one
    dimension becomes [elements, bytes of an element]."""
    columns, num_bytes = BLOCKS[tensor.type]
    *rows, size = tensor.shape or (1,)
    return (*rows, size // columns * num_bytes) if rows else (size, num_bytes // columns)


def _takes_bytes(target: Target | None) -> bool:
    return target is not None and target.tensor.dtype == torch.uint8
