"""`LoRARegistry`: the adapters of a server, shared by all of its API processes, and the parsing of
--lora-modules: `name=path` or JSON."""

import asyncio
import json
import os
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from quire.data.lora import LoRARequest
from quire.errors import ConfigError

MAX_NAME = 256
_FIELDS = ("name", "path", "base_model_name")


class LoRAModule(msgspec.Struct, frozen=True, omit_defaults=True):
    """The name and location of a LoRA adapter."""

    name: str
    root: str
    """Location as the user gives it: a directory, a hub id or a URL."""
    path: str = ""
    """Local directory; empty until the adapter has been located."""
    base: str | None = None
    """Name of the base model."""
    is_3d: bool = False
    within: tuple[str, ...] = ()
    """Directories that must contain the adapter's files when they are opened; empty: not checked."""
    is_unloading: bool = False
    """Whether the adapter is being unloaded: running requests still use it."""

    def request(self, *, load_inplace: bool = False) -> LoRARequest:
        return LoRARequest(
            self.name,
            zlib.crc32(self.name.encode()) + 1,
            self.path,
            base_model_name=self.base,
            load_inplace=load_inplace,
            is_3d_lora_weight=self.is_3d,
            within=self.within,
        )


def name_problem(name: str) -> str:
    """Return the reason why `name` is not a valid adapter name; empty if it is valid."""
    if not 0 < len(name) <= MAX_NAME:
        return f"an adapter name must have 1 to {MAX_NAME} characters, not {len(name)}"
    if not name.isprintable():
        return f"the adapter name {name!r:.80} contains characters that are not printable"
    return ""


def read_modules(values: Iterable[str]) -> tuple[LoRAModule, ...]:
    """Return the adapters of --lora-modules, or raise a ConfigError."""
    modules: dict[str, LoRAModule] = {}
    for value in values:
        for module in _parse(value):
            if problem := name_problem(module.name):
                raise ConfigError(f"lora_modules: {problem}")
            if module.name in modules:
                raise ConfigError(f"lora_modules: two adapters have the name {module.name!r}")
            modules[module.name] = module
    return tuple(modules.values())


def check_modules(modules: Sequence[LoRAModule], *, enabled: bool, served: Sequence[str]) -> None:
    """Raise a ConfigError if the adapters cannot be served with a model of these names."""
    if modules and not enabled:
        raise ConfigError("lora_modules needs enable_lora: give --enable-lora, too")
    for module in modules:
        if module.name in served:
            raise ConfigError(
                f"lora_modules: {module.name!r} is the name of the model; give the adapter another one, or "
                "the model, with --served-model-name"
            )


def _parse(value: str) -> list[LoRAModule]:
    if value.lstrip().startswith(("{", "[")):
        try:
            entries = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"lora_modules: {value!r:.200} is not valid JSON: {error}") from None
        return [_parse_entry(entry) for entry in (entries if isinstance(entries, list) else [entries])]
    name, equals, path = value.partition("=")
    if not equals or not path:
        raise ConfigError(
            f"lora_modules: {value!r:.200} must be name=path, or JSON such as "
            '\'{"name": "a", "path": "/adapters/a"}\''
        )
    return [LoRAModule(name.strip(), path)]


def _parse_entry(entry: Any) -> LoRAModule:
    if not isinstance(entry, dict) or not {"name", "path"} <= entry.keys():
        raise ConfigError(f"lora_modules: {entry!r:.200} must be an object with `name` and `path`")
    for field, value in entry.items():
        if field not in _FIELDS:
            raise ConfigError(f"lora_modules: unknown field {field!r}; known: {', '.join(_FIELDS)}")
        if not isinstance(value, str) and not (field == "base_model_name" and value is None):
            raise ConfigError(f"lora_modules: {field} must be a string, not {value!r:.80}")
    if not entry["path"]:
        raise ConfigError(f"lora_modules: the path of {entry['name']!r} is empty")
    return LoRAModule(entry["name"], entry["path"], base=entry.get("base_model_name"))


_NUM_LOCKS = 1024
"""Number of locks. Names that hash to the same lock wait for each other."""
_POLL_S = 0.05
_TICK_NS = 1_000_000


class LoRARegistry:
    """Adapters by name, in a file that API processes share, or in memory.

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
