"""The LoRA adapters of a command line, parsed from --lora-modules: `name=path` or JSON."""

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

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
    """Raise a ConfigError if there are adapters although LoRA is not `enabled`, or if an adapter has one of
    the model's names `served`."""
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
