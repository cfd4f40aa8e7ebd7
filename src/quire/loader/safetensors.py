"""Weights from safetensors files, read by several threads: straight into place where the types agree."""

import ctypes
import itertools
import json
import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO, RawIOBase
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.checkpoint.model import Checkpoint
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.shards import find_shards
from quire.loader.source import check_type
from quire.quant.format import Format

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
"""By the names of the format."""
_CHUNK_BYTES = 32 << 20
"""Read at a time where the bytes cannot go straight to their place."""

_LARGE_BYTES = 8 << 20
"""From here on memory is asked for in large pages."""


class TensorEntry(NamedTuple):
    """Where a tensor lies."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the start of the file."""
    row_bytes: int = 0
    """From one row to the next, where other bytes lie between them."""


class SafetensorsSource:
    """The tensors of safetensors files."""

    num_readers = 4
    """As many requests as a disk of today wants to see at once."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        paths = self._find(checkpoint)
        self.entries = {name: entry for path in paths for name, entry in entries_of(path).items()}
        self._own = threading.local()

    def _find(self, checkpoint: Checkpoint) -> list[Path]:
        return find_shards(checkpoint.path, "model", ".safetensors")

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].dtype

    def order(self, targets: Mapping[str, Target]) -> Iterable[str]:
        return [name for name in self.entries if name in targets]

    def format(self, plain: Format) -> Format:
        return plain

    @torch.inference_mode()  # a thread of a pool does not know in which mode the tensors were made
    def fill(self, target: Target) -> None:
        entry, into = self.entries[target.name], target.tensor
        check_type(entry.dtype, target)
        ask_for_large_pages(into)
        try:
            with entry.path.open("rb", buffering=0) as file:
                for stored, own in _pieces(entry, target):
                    self._fill(file, stored, own)
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
        """Row by row out of mapped memory, of which only the pages with these columns are read."""
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
        if not hasattr(self._own, "stages"):
            self._own.stages = itertools.cycle([_Stage(device), _Stage(device)])
        stage: _Stage = next(self._own.stages)
        return stage

    def _read_in_pieces(self, file: FileIO, entry: TensorEntry, into: Tensor) -> None:
        """Through memory of this thread, some rows at a time: another type, another device."""
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
    """Memory that bytes pass through on their way to a device: page-locked where that is a GPU, so that the
    next are read while these are on their way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.left = torch.cuda.Event() if device.type == "cuda" else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.left is not None:
            self.left.synchronize()
        if len(self.memory) < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.left is not None)
        return self.memory[:num_bytes].view(dtype).view(shape)

    def copy(self, values: Tensor, into: Tensor) -> None:
        if self.left is None:
            into.copy_(values)
        else:  # a type is changed over there, where it costs nothing
            into.copy_(values.to(self.device, non_blocking=True))
            self.left.record(torch.cuda.current_stream(self.device))


def entries_of(path: Path) -> dict[str, TensorEntry]:
    """What a file holds, once its header is known to fit its size."""
    try:
        with safe_open(path, framework="np"):  # checks that every byte is some tensor's
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} is not a whole safetensors file ({error}); it is truncated or corrupt, download it again"
        ) from error
    header.pop("__metadata__", None)
    strange = sorted({each["dtype"] for each in header.values()} - DTYPES.keys())
    if strange:
        raise ConfigError(f"{path} holds {strange[0]} tensors; known: {', '.join(DTYPES)}")
    return {
        name: TensorEntry(
            path, DTYPES[each["dtype"]], tuple(each["shape"]), 8 + size + each["data_offsets"][0]
        )
        for name, each in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    }


def _pieces(entry: TensorEntry, target: Target) -> Iterator[tuple[TensorEntry, Tensor]]:
    """What the target takes of a tensor: where each part of it lies, and where it goes."""
    if target.is_whole:
        yield entry._replace(shape=tuple(target.tensor.shape)), target.tensor
        return
    shape, axis = target.shape, target.axis
    assert axis is not None
    unit = math.prod(shape[axis + 1 :]) * entry.dtype.itemsize
    row_bytes = shape[axis] * unit
    for own, into in target.slices():
        size = own.stop - own.start
        first = entry._replace(offset=entry.offset + own.start * unit, shape=tuple(into.shape))
        if axis == 0 or math.prod(shape[:axis]) == 1:
            yield first, into
        elif axis == 1:
            yield first._replace(row_bytes=row_bytes), into
        else:  # matrices, one behind the other
            rows = shape[axis - 1]
            part = first._replace(shape=(rows, size, *shape[axis + 1 :]), row_bytes=row_bytes)
            for i, matrix in enumerate(into.flatten(0, axis - 2)):
                yield part._replace(offset=first.offset + i * rows * row_bytes), matrix


def _read(file: RawIOBase, into: Tensor) -> None:
    """As many bytes as the tensor has."""
    rest = into.flatten().view(torch.uint8).numpy().data
    while rest:
        num_read = file.readinto(rest)
        if not num_read:
            raise OSError("it ends early")
        rest = rest[num_read:]


def ask_for_large_pages(into: Tensor) -> None:
    """Before the memory is touched: the kernel gives it out by the page, and small ones take longer than what
    is read into them."""
    if into.device.type != "cpu" or into.nbytes < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -(-into.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = ctypes.c_size_t(into.data_ptr() + into.nbytes - start)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, mmap.MADV_HUGEPAGE)  # refused: no harm
