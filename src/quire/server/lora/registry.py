"""`LoRARegistry`: the adapters of a server, shared by all of its API processes."""

import asyncio
import os
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from quire.server.lora.modules import LoRAModule

_NUM_LOCKS = 1024
"""Number of lock files for adapter names. Changes of adapters whose names hash to the same lock wait for each
other."""
_POLL_S = 0.05
_TICK_NS = 1_000_000


class LoRARegistry:
    """The LoRA adapters of a server by name, in a file that all API processes share, or in memory.

    A process that changes the registry replaces the file; the others notice the new modification time.
    """

    def __init__(self, file: Path | None = None, modules: Iterable[LoRAModule] = ()) -> None:
        """Create a registry of the entries in `file`, or, if `file` is None, of `modules` in memory."""
        self._file = file
        self._loaded_mark = None if file is None else file.with_name(f"{file.name}.read")
        """File that exists once the initial adapters have been loaded."""
        self._modules: dict[str, LoRAModule] = {module.name: module for module in modules}
        self._mtime = -1
        self._locks: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @staticmethod
    def create(file: Path, modules: Iterable[LoRAModule]) -> None:
        _write(file, {module.name: module for module in modules}, _TICK_NS)

    @property
    def is_loaded(self) -> bool:
        """Whether the initial adapters have been loaded."""
        return self._loaded_mark is not None and self._loaded_mark.exists()

    def mark_loaded(self) -> None:
        if self._loaded_mark is not None:
            self._loaded_mark.touch()

    def all(self) -> Mapping[str, LoRAModule]:
        if self._file is not None and (mtime := os.stat(self._file).st_mtime_ns) != self._mtime:
            modules = msgspec.json.decode(self._file.read_bytes(), type=list[LoRAModule])
            self._modules, self._mtime = {module.name: module for module in modules}, mtime
        return self._modules

    def put(self, module: LoRAModule) -> None:
        with self._editing() as modules:
            modules[module.name] = module

    def drop(self, name: str) -> LoRAModule | None:
        with self._editing() as modules:
            return modules.pop(name, None)

    @contextmanager
    def _editing(self) -> Iterator[dict[str, LoRAModule]]:
        if self._file is None:
            yield self._modules
            return
        with FileLock(f"{self._file}.lock"):
            modules = dict(self.all())
            yield modules
            _write(self._file, modules, os.stat(self._file).st_mtime_ns + _TICK_NS)

    def is_free(self, name: str) -> bool:
        """Whether no process is changing the adapter of this name."""
        number = _lock_index(name)
        if self._file is None or self._locks[number].locked():
            return not self._locks[number].locked()
        try:
            with FileLock(f"{self._file}.{number}.lock", blocking=False):
                return True
        except Timeout:
            return False

    @asynccontextmanager
    async def locked(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of an adapter's name, so that no other task or process changes the adapter."""
        number = _lock_index(name)
        async with self._locks[number]:
            if self._file is None:
                yield
                return
            lock = FileLock(f"{self._file}.{number}.lock")
            while True:
                try:
                    lock.acquire(blocking=False)
                    break
                except Timeout:
                    await asyncio.sleep(_POLL_S)
            try:
                yield
            finally:
                lock.release()


def _lock_index(name: str) -> int:
    return zlib.crc32(name.encode()) % _NUM_LOCKS


def _write(file: Path, modules: Mapping[str, LoRAModule], version_ns: int) -> None:
    """Write the file, with `version_ns` as its modification time. This time is a version number: clocks are
    too coarse to tell two changes apart."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(msgspec.json.encode(list(modules.values())))
    os.utime(new, ns=(version_ns, version_ns))
    os.replace(new, file)
