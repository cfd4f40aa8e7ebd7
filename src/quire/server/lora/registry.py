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
"""Number of locks. Names that hash to the same lock wait for each other."""
_POLL_S = 0.05
_TICK_NS = 1_000_000


class LoRARegistry:
    """Adapters by name, in a file that API processes share, or in memory.

    A process that changes it replaces the file; the other processes notice the new modification time.
    """

    def __init__(self, file: Path | None = None, modules: Iterable[LoRAModule] = ()) -> None:
        """Create a registry. `modules` are the entries of one in memory; one in a file reads them from it."""
        self._file = file
        self._known: dict[str, LoRAModule] = {module.name: module for module in modules}
        self._mtime = -1
        self._locks: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @staticmethod
    def create(file: Path, modules: Iterable[LoRAModule]) -> None:
        _write(file, {module.name: module for module in modules}, _TICK_NS)

    @property
    def is_read(self) -> bool:
        """Whether the initial adapters have been loaded."""
        return self._file is not None and self._read_mark(self._file).exists()

    def mark_read(self) -> None:
        if self._file is not None:
            self._read_mark(self._file).touch()

    @staticmethod
    def _read_mark(file: Path) -> Path:
        return file.with_name(f"{file.name}.read")

    def all(self) -> Mapping[str, LoRAModule]:
        if self._file is not None and (mtime := os.stat(self._file).st_mtime_ns) != self._mtime:
            modules = msgspec.json.decode(self._file.read_bytes(), type=list[LoRAModule])
            self._known, self._mtime = {module.name: module for module in modules}, mtime
        return self._known

    def put(self, module: LoRAModule) -> None:
        with self._changing() as known:
            known[module.name] = module

    def drop(self, name: str) -> LoRAModule | None:
        with self._changing() as known:
            return known.pop(name, None)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, LoRAModule]]:
        if self._file is None:
            yield self._known
            return
        with FileLock(f"{self._file}.lock"):
            known = dict(self.all())
            yield known
            _write(self._file, known, os.stat(self._file).st_mtime_ns + _TICK_NS)

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
    async def only(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of a name: no other task or process changes its adapter."""
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
    """Return the index of the name's lock."""
    return zlib.crc32(name.encode()) % _NUM_LOCKS


def _write(file: Path, known: Mapping[str, LoRAModule], version_ns: int) -> None:
    """Write the file. Its modification time is a version number, since clocks are too coarse."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(msgspec.json.encode(list(known.values())))
    os.utime(new, ns=(version_ns, version_ns))
    os.replace(new, file)
