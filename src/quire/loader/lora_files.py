"""`LoRAFiles`: the files of an adapter, opened once, so that the checked files are the ones that are read."""

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

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.loader.pt import load_pickle_bytes
from quire.loader.safetensors import ask_for_large_pages, parse_header

_MAX_CONFIG = 1 << 20
_THREADS, _PART_BYTES = 8, 2 << 20
"""Threads that read the file, and the bytes that each reads at a time."""
CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


class _Opened(NamedTuple):
    name: str
    fd: int
    size: int

    @property
    def path(self) -> Path:
        """Return a path to the open file, even if its name now refers to another one."""
        return Path(f"/proc/self/fd/{self.fd}")


class LoRAContents(NamedTuple):
    """SHA-256 digest of an adapter's config and tensor files, and its tensors by name."""

    digest: bytes
    tensors: dict[str, Tensor]


class LoRAFiles:
    """The configuration and the tensors of the adapter in a folder. Both files must lie inside the
    directories `within` after links are resolved; an empty `within` allows any directory."""

    def __init__(self, folder: Path, within: Sequence[str] = ()) -> None:
        self.folder = folder
        self._within = within
        self._closing = ExitStack()

    def __enter__(self) -> "LoRAFiles":
        with ExitStack() as failing:
            failing.push(self._closing.__exit__)
            config = self._open(CONFIG)
            if config is None:
                raise FileNotFoundError(f"No adapter found for {self.folder}: there is no {CONFIG}")
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
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        real = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self._within and not any(real.is_relative_to(root) for root in self._within):
            raise ConfigError(f"{name} is a link to a file outside the allowed directories")
        return _Opened(name, fd, status.st_size)

    def check_sizes(self, most: int) -> None:
        """Raise a ConfigError if the tensor file has more than `most` bytes, or the config file more than a
        fixed limit. Called before reading, since the folder may contain anything."""
        for file, limit in ((self._config, _MAX_CONFIG), (self._tensors, most)):
            if file is not None and file.size > limit:
                raise ConfigError(
                    f"{file.name} has {file.size} bytes, and no adapter of this model has more than {limit}"
                )

    def config(self) -> dict[str, Any]:
        try:
            config = json.loads(self._config_bytes.decode())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{CONFIG} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{CONFIG} holds a JSON {type(config).__name__}, expected an object")
        return config

    @property
    def tensors_name(self) -> str:
        return PICKLE if self._tensors is None else self._tensors.name

    def contents(self) -> LoRAContents:
        """Return the digest and the tensors of the adapter. The files are read once, so that the digest
        belongs to these tensors."""
        file = self._tensors
        if file is None:
            raise ConfigError(f"{self.folder} has neither {TENSORS} nor {PICKLE}")
        memory = torch.empty(file.size, dtype=torch.uint8)
        ask_for_large_pages(memory)
        # A pool per adapter, so that a stalled disk delays no other adapter.
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
    """Read up to `_PART_BYTES` bytes from the offset `start` into `memory`, and return their SHA-256
    digest."""
    part = rest = memory[start : start + _PART_BYTES]
    while rest:
        count = os.preadv(file.fd, [rest], start + len(part) - len(rest))
        if not count:
            raise ConfigError(f"{file.name} became shorter while it was read")
        rest = rest[count:]
    return hashlib.sha256(part).digest()


def _tensors_of(memory: Tensor) -> dict[str, Tensor]:
    """Return views of the tensors in a safetensors file."""
    tensors, data = {}, memory.numpy().data
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    for name, entry in parse_header(Path(TENSORS), header, len(memory)).items():
        piece = memory[entry.offset :][: math.prod(entry.shape) * entry.dtype.itemsize]
        if entry.offset % entry.dtype.itemsize:
            piece = piece.clone()  # to align it
        tensors[name] = piece.view(entry.dtype).view(entry.shape)
    return tensors
