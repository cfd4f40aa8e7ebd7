"""`LoRAFiles`: the files of an adapter, opened once, so that what was checked of them is what is read."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.loader.pt import load_pickle_bytes
from quire.loader.safetensors import DTYPES, ask_for_large_pages

_MAX_CONFIG = 1 << 20
_THREADS, _PART_BYTES = 8, 2 << 20
"""That read it, and what one of them reads at a time."""
CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


class _Opened(NamedTuple):
    name: str
    fd: int
    size: int

    @property
    def path(self) -> Path:
        """The file itself, whatever its name has come to mean."""
        return Path(f"/proc/self/fd/{self.fd}")


class LoRAContents(NamedTuple):
    """Of all of an adapter's files."""

    digest: bytes
    tensors: dict[str, Tensor]


class LoRAFiles:
    """The configuration and the tensors of the adapter in a folder. `within` are the directories that both
    must lie in when they are opened, links followed; none: anywhere."""

    def __init__(self, folder: Path, within: Sequence[str] = ()) -> None:
        self.folder = folder
        self._within = within
        self._closing = ExitStack()

    def __enter__(self) -> "LoRAFiles":
        with ExitStack() as failing:
            failing.push(self._closing.__exit__)
            config = self._open(CONFIG)
            if config is None:
                raise FileNotFoundError(f"No adapter found for {self.folder}")
            self._config, self._tensors = config, self._open(TENSORS) or self._open(PICKLE)
            failing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def _open(self, name: str) -> _Opened | None:
        try:
            fd = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        self._closing.callback(os.close, fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None
        real = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self._within and not any(real.is_relative_to(root) for root in self._within):
            raise ConfigError(f"{name} is a link to what is outside of the directories that are allowed")
        return _Opened(name, fd, found.st_size)

    def check_sizes(self, most: int) -> None:
        """Before anything is read: whoever puts adapters there may put anything there."""
        for file, limit in ((self._config, _MAX_CONFIG), (self._tensors, most)):
            if file is not None and file.size > limit:
                raise ConfigError(
                    f"{file.name} has {file.size} bytes, and no adapter of this model has more than {limit}"
                )

    def config(self) -> dict[str, Any]:
        try:
            found = json.loads(self._config_bytes.decode())
        except ValueError as error:
            raise ConfigError(f"{CONFIG} is not valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{CONFIG} holds a JSON {type(found).__name__}, expected an object")
        return found

    @property
    def tensors_name(self) -> str:
        return PICKLE if self._tensors is None else self._tensors.name

    def contents(self) -> LoRAContents:
        """All of it, read once: what the digest is of is what the tensors are."""
        file = self._tensors
        if file is None:
            raise ConfigError(f"{self.folder} has neither {TENSORS} nor {PICKLE}")
        memory = torch.empty(file.size, dtype=torch.uint8)
        ask_for_large_pages(memory)
        # Threads of its own: a disk that never answers holds up no other adapter.
        with ThreadPoolExecutor(_THREADS, "quire-adapter-file") as pool:
            parts = pool.map(partial(_read_part, file, memory.numpy().data), range(0, file.size, _PART_BYTES))
        digest = hashlib.sha256(hashlib.sha256(self._config_bytes).digest() + b"".join(parts)).digest()
        if file.name == TENSORS:
            return LoRAContents(digest, _tensors_of(memory))
        return LoRAContents(digest, load_pickle_bytes(file.name, memory.numpy().data))

    @cached_property
    def _config_bytes(self) -> bytes:
        return self._config.path.read_bytes()


def _read_part(file: _Opened, memory: memoryview, start: int) -> bytes:
    """Its digest."""
    part = rest = memory[start : start + _PART_BYTES]
    while rest:
        count = os.preadv(file.fd, [rest], start + len(part) - len(rest))
        if not count:
            raise ConfigError(f"{file.name} became shorter while it was read")
        rest = rest[count:]
    return hashlib.sha256(part).digest()


class _Stored(msgspec.Struct):
    """A tensor as the header of a safetensors file has it. The entry that is none has other fields."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


def _tensors_of(memory: Tensor) -> dict[str, Tensor]:
    """Views of what a safetensors file holds, of which each byte must be some tensor's."""
    written = memory.numpy().data
    try:
        start = 8 + int.from_bytes(written[:8], "little")
        header = msgspec.json.decode(written[8:start], type=dict[str, _Stored])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _not_whole(str(error)) from error
    header.pop("__metadata__", None)
    found, at = {}, start
    for name, stored in sorted(header.items(), key=lambda item: item[1].data_offsets):
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise ConfigError(f"{name} of {TENSORS} is {stored.dtype!r}; known: {', '.join(DTYPES)}")
        first, end = (start + offset for offset in stored.data_offsets)
        size = math.prod(stored.shape) * dtype.itemsize
        if first != at or end != at + size or end > len(memory) or min(stored.shape, default=0) < 0:
            raise _not_whole(f"the bytes of {name} are not where they should be")
        piece, at = memory[first:end], end
        if first % dtype.itemsize:
            piece = piece.clone()  # to where numbers of this size may lie
        found[name] = piece.view(dtype).view(stored.shape)
    if at != len(memory):
        raise _not_whole(f"it has {len(memory)} bytes, and its header says {at}")
    return found


def _not_whole(why: str) -> ConfigError:
    return ConfigError(f"{TENSORS} is not a whole safetensors file: {why}")
