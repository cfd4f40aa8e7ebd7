"""`AdapterFiles`: the files of an adapter, opened once, so that what was checked of them is what is read."""

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quire.errors import ConfigError
from quire.loader.pt import load_pickle

_MAX_CONFIG = 1 << 20
_DIGESTING, _DIGESTED = 8, 2 << 20
"""Threads, and the bytes of a part."""
CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


class _Opened(NamedTuple):
    name: str
    fd: int
    size: int

    @property
    def path(self) -> Path:
        """The file itself, whatever its name has come to mean."""
        return Path(f"/proc/self/fd/{self.fd}")


class AdapterFiles:
    """The configuration and the tensors of the adapter in a folder. `within` are the directories that both
    must lie in when they are opened, links followed; none: anywhere."""

    def __init__(self, folder: Path, within: Sequence[str] = ()) -> None:
        self.folder = folder
        self._within = within
        self._closing = ExitStack()

    def __enter__(self) -> "AdapterFiles":
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
            found = json.loads(self._config.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{CONFIG} is not valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{CONFIG} holds a JSON {type(found).__name__}, expected an object")
        return found

    def tensors(self) -> dict[str, Tensor]:
        file = self._tensors
        if file is None:
            raise ConfigError(f"{self.folder} has neither {TENSORS} nor {PICKLE}")
        if file.name == PICKLE:
            try:
                return load_pickle(file.path)
            except ConfigError as error:
                raise ConfigError(str(error).replace(str(file.path), file.name)) from error
        try:
            tensors: dict[str, Tensor] = load_file(file.path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file.name} is not a whole safetensors file: {error}") from error
        return tensors

    @property
    def tensors_name(self) -> str:
        return PICKLE if self._tensors is None else self._tensors.name

    def digest(self) -> bytes:
        """Of the configuration and of the weights, these part by part: one core alone would take longer than
        all the rest of reading."""
        found = hashlib.sha256(self._config.path.read_bytes())
        if (file := self._tensors) is not None:
            with ThreadPoolExecutor(_DIGESTING, "quire-digest") as pool:

                def of_part(start: int) -> bytes:
                    return hashlib.sha256(os.pread(file.fd, _DIGESTED, start)).digest()

                for digest in pool.map(of_part, range(0, file.size, _DIGESTED)):
                    found.update(digest)
        return found.digest()
