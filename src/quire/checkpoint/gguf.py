"""Reading .gguf files: the header and the memory-mapped tensors. All values in the file are validated."""

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 8
_MAX_ARRAY_DEPTH = 8
_MAX_ALIGNMENT = 1 << 20
_NUM_NAMED = 5
_MAX_LIST = 1000
"""Number of strings in an array of the header above which the array is decoded only when it is used."""

SAMPLING_KEYS = {
    "repetition_penalty": "general.sampling.penalty_repeat",
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
}
"""GGUF header keys of default sampling parameters, by the names of the parameters in
generation_config.json."""

# Value types of the format by number: numpy dtypes of the scalars; strings and arrays follow.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING = 8
_ARRAY = 9

# ggml type number -> (name, weights in a block, bytes of a block).
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Location of one tensor in the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch."""
    type: str
    """The ggml type's name, such as Q4_1."""
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int


class GGUFStrings(Sequence[str]):
    """The strings of a vocabulary in a mapped file. They are decoded each time that they are used: as Python
    objects they would take 5 to 30 MB, and most readers of a file need only its other values."""

    def __init__(self, data: bytes | mmap.mmap, start: int, number: int) -> None:
        self._data, self._start, self._number = data, start, number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[str]:
        data, at, unpack = self._data, self._start, _U64.unpack_from
        for _ in range(self._number):
            end = at + 8 + unpack(data, at)[0]
            yield data[at + 8 : end].decode("utf-8", "replace")
            at = end

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class GGUFFile:
    """A GGUF file (version 2 or 3, little endian), mapped read-only as long as this object or a view of a
    tensor exists. A path to any part of a split file opens all parts; the metadata are in the first part."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._maps: list[bytes | mmap.mmap] = []
        self._part_of: dict[str, int] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        for number, part in enumerate(split_parts(self.path)):
            self._maps.append(_map_file(part))
            header = _Header(part, self._maps[-1])
            metadata = header.metadata()
            tensors = header.tensors(metadata.get("general.alignment", 32))
            if twice := next((name for name in tensors if name in self.tensors), None):
                raise header.bad(f"tensor {twice} is also in another part")
            if number == 0:
                self.version, self.metadata = header.version, metadata
            self.tensors |= tensors
            self._part_of |= dict.fromkeys(tensors, number)
        whole = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(self._maps) > 1 and whole != len(self.tensors):
            raise ConfigError(
                f"{self.path}: its parts have {len(self.tensors)} tensors, not {whole}; download them again"
            )

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the tensor's bytes as a read-only view of the file, without a copy."""
        tensor, data = self.tensors[name], self._maps[self._part_of[name]]
        return np.frombuffer(data, np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def forget(self) -> None:
        """Release the memory of the pages that were read; the file is read again on the next access."""
        for data in self._maps:
            if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                data.madvise(mmap.MADV_DONTNEED)


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split file (`-00001-of-00003.gguf`), or the name itself."""
    match = _PART.search(name)
    if match is None:
        return [name]
    return [f"{name[: match.start()]}-{i:05}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]


def split_parts(path: Path) -> list[Path]:
    """Return the paths of all parts of a split file, and raise if one is missing."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in parts if not part.is_file()] if len(parts) > 1 else []
    if missing:
        named = ", ".join(missing[:_NUM_NAMED])
        more = f" and {len(missing) - _NUM_NAMED} more" if len(missing) > _NUM_NAMED else ""
        raise ConfigError(
            f"{path} is one of {len(parts)} parts; missing in the same directory: {named}{more}"
        )
    return parts


def _map_file(path: Path) -> bytes | mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfigError(f"cannot read the GGUF file {path}: {error.strerror or error}") from error


class _Header:
    """A cursor over the file's header. Every read is checked against the end of the file first."""

    def __init__(self, path: Path, data: bytes | mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        magic = data[:4]
        if magic != _MAGIC:
            raise ConfigError(
                f"{path} is not a GGUF file: bad magic {bytes(magic)!r}, expected {_MAGIC!r}; "
                "give a .gguf file or a model directory"
            )
        self.at = 4
        self.version = self.u32("the version")
        if self.version not in _VERSIONS:
            big_endian = int.from_bytes(self.version.to_bytes(4, "little"), "big") in _VERSIONS
            reason = "it is big-endian" if big_endian else f"its version is {self.version}"
            raise self.bad(f"{reason}; Quire reads little-endian versions 2 and 3, convert the file again")
        self.num_tensors = self.count("tensors", self.u64("the number of tensors"), item_bytes=24)
        self.num_keys = self.count("metadata keys", self.u64("the number of metadata keys"), item_bytes=13)

    def bad(self, what: str) -> ConfigError:
        return ConfigError(f"the GGUF file {self.path} cannot be used: {what}")

    def take(self, num_bytes: int, what: str) -> int:
        """Move the cursor over `num_bytes` and return its old position; `what` describes the bytes in
        errors."""
        start = self.at
        if num_bytes > self.size - start:
            raise self.bad(
                f"the header ends early: {what} needs {num_bytes} bytes at offset {start}, "
                f"the file has {self.size}; it is truncated or corrupt, download it again"
            )
        self.at = start + num_bytes
        return start

    def count(self, of: str, number: int, item_bytes: int) -> int:
        """Return `number`, or raise if the rest of the file is too short for that many items of at least
        `item_bytes`; `of` names the items in the error."""
        remaining = self.size - self.at
        if number > remaining // item_bytes:
            raise self.bad(
                f"the header claims {number} {of}, more than the remaining {remaining} bytes can hold; "
                "it is truncated or corrupt, download it again"
            )
        return number

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def string(self, what: str) -> str:
        start = self.take(self.u64(what), what)
        return self.data[start : self.at].decode("utf-8", "replace")

    def strings(self, number: int, what: str) -> Sequence[str]:
        """Read an array of strings. Since vocabularies have 150k strings, the loop uses local names only."""
        data, at, size = self.data, self.at, self.size
        unpack = _U64.unpack_from
        strings = GGUFStrings(data, at, number)
        for _ in range(number):
            end = at + 8
            if end <= size:
                end += unpack(data, at)[0]
            if end > size:
                self.at = at
                self.take(end - at, what)
            at = end
        self.at = at
        return strings if number > _MAX_LIST else list(strings)

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, depth)
        dtype = self.scalar_type(kind, what)
        start = self.take(dtype.itemsize, what)
        return np.frombuffer(self.data[start : self.at], dtype)[0].item()

    def scalar_type(self, kind: int, what: str) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise self.bad(f"{what} has the unknown value type {kind}; it is corrupt, download it again")
        return _SCALARS[kind]

    def array(self, what: str, depth: int) -> Any:
        if depth == _MAX_ARRAY_DEPTH:
            raise self.bad(f"{what} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        kind = self.u32(what)
        number = self.u64(what)
        if kind == _STRING:
            return self.strings(self.count(f"strings in {what}", number, item_bytes=8), what)
        if kind == _ARRAY:
            number = self.count(f"arrays in {what}", number, item_bytes=12)
            return [self.array(what, depth + 1) for _ in range(number)]
        dtype = self.scalar_type(kind, what)
        start = self.take(number * dtype.itemsize, what)
        return np.frombuffer(self.data[start : self.at], dtype)

    def metadata(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for index in range(self.num_keys):
            key = self.string(f"the name of metadata key {index}")
            out[key] = self.value(self.u32(f"the type of {key}"), key)
        return out

    def tensors(self, alignment: Any) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise self.bad(f"general.alignment is {alignment!r}, not a number from 1 to {_MAX_ALIGNMENT}")
        listed = [self.tensor(index) for index in range(self.num_tensors)]
        data_start = -(-self.at // alignment) * alignment
        out: dict[str, GGUFTensor] = {}
        for tensor in listed:
            offset = data_start + tensor.offset
            end = offset + tensor.nbytes
            if end > self.size:
                raise self.bad(
                    f"tensor {tensor.name} runs past the end of the file: expected {end} bytes, "
                    f"the file has {self.size}; it is truncated, download it again"
                )
            if tensor.name in out:
                raise self.bad(f"tensor {tensor.name} is listed twice")
            out[tensor.name] = GGUFTensor(tensor.name, tensor.shape, tensor.type, offset, tensor.nbytes)
        return out

    def tensor(self, index: int) -> GGUFTensor:
        """Read one entry of the tensor list; its offset is relative to the start of the data."""
        name = self.string(f"the name of tensor {index}")
        num_dims = self.u32(name)
        if num_dims > _MAX_DIMS:
            raise self.bad(f"tensor {name} has {num_dims} dimensions, at most {_MAX_DIMS} make sense")
        dims = [self.u64(name) for _ in range(num_dims)]
        number = self.u32(name)
        if number not in GGML_TYPES:
            raise self.bad(f"tensor {name} has the ggml type {number}, which Quire does not support")
        kind, block_len, block_bytes = GGML_TYPES[number]
        if dims and dims[0] % block_len:
            raise self.bad(f"tensor {name} ({kind}) has rows of {dims[0]}, not a multiple of {block_len}")
        nbytes = prod(dims) // block_len * block_bytes
        return GGUFTensor(name, tuple(reversed(dims)), kind, self.u64(name), nbytes)
