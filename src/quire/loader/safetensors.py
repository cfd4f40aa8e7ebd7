"""Weights from safetensors files, read by several threads; directly into parameters if the dtypes agree."""

import ctypes
import itertools
import math
import mmap
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.checkpoint.model import Checkpoint
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.shards import find_shards
from quire.loader.source import Source, check_type

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name of a dtype in safetensors files -> torch dtype."""
_MAX_HEADER_BYTES = 100 << 20
_CHUNK_BYTES = 32 << 20
"""Bytes read at a time if they cannot be read directly into the parameter."""

_LARGE_BYTES = 8 << 20
"""Minimum size in bytes of memory that is requested in huge pages."""


_FLATTENED = re.compile(r"(?:\._weight_|\.weight:)(\w+)$")
"""Name endings of the parts of a torchao tensor, each a tensor of the file; with a colon in version 0.14."""
_INPUT_SCALE = re.compile(r"\.weight_act_(pre_scale|quant_\w+)$")
"""Name endings of torchao's scales of inputs; checkpoints with such scales are rejected."""


def _torchao_names(entries: dict[str, "TensorEntry"]) -> dict[str, "TensorEntry"]:
    """Return the tensors of torchao under the names that other quantization packages use."""
    named = {
        _FLATTENED.sub(_plain_name, name).removesuffix(":_data"): entry for name, entry in entries.items()
    }
    if scale := next(filter(_INPUT_SCALE.search, named), None):
        raise ConfigError(f"{named[scale].path}: {scale} is a scale of inputs, which is not supported")
    return named


def _plain_name(part: re.Match[str]) -> str:
    return ".weight" if part[1] in ("qdata", "_data") else f".weight_{part[1]}"


class TensorEntry(NamedTuple):
    """A tensor of a safetensors file: the file's path, the dtype, the shape and the position of the data."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte in the file."""
    row_bytes: int = 0
    """Bytes between the starts of rows, if other bytes lie between the rows."""


class SafetensorsSource(Source):
    """The tensors of safetensors files."""

    num_readers = 4
    """Number of reader threads: a modern disk is fastest with several reads in flight."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self.entries = merged_entries(self._find(checkpoint))
        if checkpoint.quant is not None and checkpoint.quant.method == "torchao":
            self.entries = _torchao_names(self.entries)
        self._local = threading.local()

    def _find(self, checkpoint: Checkpoint) -> list[Path]:
        return find_shards(checkpoint.path, "model", ".safetensors")

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].dtype

    def order(self, targets: Mapping[str, Target]) -> Iterable[str]:
        return [name for name in self.entries if name in targets]

    @torch.inference_mode()  # a pool thread may run in another mode than the one the tensors were made in
    def fill(self, target: Target) -> None:
        entry, into = self.entries[target.name], target.tensor
        check_type(entry.dtype, target)
        ask_for_large_pages(into)
        try:
            with entry.path.open("rb", buffering=0) as file:
                for stored, part in _pieces(entry, target):
                    self._fill(file, stored, part)
        except OSError as error:
            raise ConfigError(
                f"cannot read {target.name} from {entry.path}: {error}; download the file again"
            ) from error

    def _fill(self, file: FileIO, entry: TensorEntry, into: Tensor) -> None:
        if entry.row_bytes:
            self._read_columns(file, entry, into)
            return
        file.seek(entry.offset)
        if into.device.type == "cpu" and into.dtype == entry.dtype and into.is_contiguous():
            _read(file, into)
        else:
            self._read_in_pieces(file, entry, into)

    def _read_columns(self, file: FileIO, entry: TensorEntry, into: Tensor) -> None:
        """Read a range of columns into a tensor, row by row from mapped memory, so that only the pages with
        these columns are read."""
        rows, *row = entry.shape
        size = math.prod(row) * entry.dtype.itemsize
        start = entry.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        skipped, length = entry.offset - start, (rows - 1) * entry.row_bytes + size
        mapped = mmap.mmap(file.fileno(), skipped + length, access=mmap.ACCESS_READ, offset=start)
        stored = np.ndarray((rows, size), np.uint8, mapped, skipped, (entry.row_bytes, 1))
        step = max(1, _CHUNK_BYTES // size)
        for first in range(0, rows, step):
            piece, stage = into[first : first + step], self._stage(into.device)
            values = stage.empty((len(piece), *row), entry.dtype)
            values.view(len(piece), -1).view(torch.uint8).numpy()[:] = stored[first : first + step]
            stage.copy(values, piece)

    def _stage(self, device: torch.device) -> "_Stage":
        if not hasattr(self._local, "stages"):
            self._local.stages = itertools.cycle([_Stage(device), _Stage(device)])
        stage: _Stage = next(self._local.stages)
        return stage

    def _read_in_pieces(self, file: FileIO, entry: TensorEntry, into: Tensor) -> None:
        """Read some rows at a time through a staging buffer, to convert the dtype or the device."""
        rows, *row = entry.shape or (1,)
        step = max(1, _CHUNK_BYTES // max(1, math.prod(row) * entry.dtype.itemsize))
        into = into if into.shape == entry.shape and into.ndim else into.view(entry.shape or 1)
        for start in range(0, rows, step):
            piece = into[start : start + step]
            stage = self._stage(into.device)
            values = stage.empty((min(step, rows - start), *row), entry.dtype)
            _read(file, values)
            stage.copy(values, piece)


class _Stage:
    """A host buffer between file and tensor. For a GPU it is page-locked and copied asynchronously, so that
    the next bytes are read into another buffer meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.memory) < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.copied is not None)
        return self.memory[:num_bytes].view(dtype).view(shape)

    def copy(self, values: Tensor, into: Tensor) -> None:
        if self.copied is None:
            into.copy_(values)
        else:  # the dtype is converted on the device
            into.copy_(values.to(self.device, non_blocking=True))
            self.copied.record(torch.cuda.current_stream(self.device))


class _Stored(msgspec.Struct):
    """An entry in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def parse_header(path: Path, header: bytes | memoryview, num_bytes: int) -> dict[str, TensorEntry]:
    """Return the entry of each tensor of a file of `num_bytes` bytes, by name, in the order of the file.
    Raise a ConfigError unless header and tensors cover the whole file."""
    start = 8 + len(header)
    try:
        tensors = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
        tensors.pop("__metadata__", None)
        named = msgspec.convert(tensors, dict[str, _Stored])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt_file(path, str(error)) from error
    entries, at = {}, start
    for name, stored in sorted(named.items(), key=lambda item: item[1].data_offsets):
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise ConfigError(f"{name} of {path} is {stored.dtype!r}; known: {', '.join(DTYPES)}")
        first, end = (start + offset for offset in stored.data_offsets)
        size = math.prod(stored.shape) * dtype.itemsize
        if first != at or end != at + size or end > num_bytes or min(stored.shape, default=0) < 0:
            raise _corrupt_file(path, f"the bytes of {name} are not where they should be")
        entries[name], at = TensorEntry(path, dtype, tuple(stored.shape), first), end
    if at != num_bytes:
        raise _corrupt_file(path, f"it has {num_bytes} bytes, but its header lists {at}")
    return entries


def _corrupt_file(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a whole safetensors file ({reason}); it is truncated or corrupt, download it again"
    )


def entries_of(path: Path) -> dict[str, TensorEntry]:
    """Return the entry of each tensor of a file, by name."""
    try:
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))
            num_bytes = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise _corrupt_file(path, str(error)) from error
    return parse_header(path, header, num_bytes)


def merged_entries(paths: list[Path]) -> dict[str, TensorEntry]:
    """Return the entry of each tensor of several files, by name."""
    return {name: entry for path in paths for name, entry in entries_of(path).items()}


def _pieces(entry: TensorEntry, target: Target) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Yield (entry, tensor) for each contiguous part of the target's shard: its position in the file, and the
    tensor to fill."""
    if target.is_whole:
        yield entry._replace(shape=tuple(target.tensor.shape)), target.tensor
        return
    shape, axis = target.shape, target.axis
    assert axis is not None
    unit = math.prod(shape[axis + 1 :]) * entry.dtype.itemsize
    row_bytes = shape[axis] * unit
    for span, into in target.slices():
        size = span.stop - span.start
        first = entry._replace(offset=entry.offset + span.start * unit, shape=tuple(into.shape))
        if axis == 0 or math.prod(shape[:axis]) == 1:
            yield first, into
        elif axis == 1:
            yield first._replace(row_bytes=row_bytes), into
        else:  # several matrices in sequence
            rows = shape[axis - 1]
            part = first._replace(shape=(rows, size, *shape[axis + 1 :]), row_bytes=row_bytes)
            for i, matrix in enumerate(into.flatten(0, axis - 2)):
                yield part._replace(offset=first.offset + i * rows * row_bytes), matrix


def _read(file: RawIOBase, into: Tensor) -> None:
    """Fill the tensor with the next bytes of the file; raise an OSError if the file is too short."""
    rest = into.flatten().view(torch.uint8).numpy().data
    while rest:
        num_read = file.readinto(rest)
        if not num_read:
            raise OSError("unexpected end of file")
        rest = rest[num_read:]


def ask_for_large_pages(into: Tensor) -> None:
    """Request huge pages before the memory is touched: faults of small pages take longer than reading."""
    if into.device.type != "cpu" or into.nbytes < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -(-into.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = ctypes.c_size_t(into.data_ptr() + into.nbytes - start)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, mmap.MADV_HUGEPAGE)  # failure is harmless
