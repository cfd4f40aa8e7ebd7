"""Adapters as the command line names them: `name=path`, or JSON."""

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.data.lora import LoRARequest
from quire.errors import ConfigError

MAX_NAME = 256
_FIELDS = ("name", "path", "base_model_name")


class Module(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter that has a name, and where it is."""

    name: str
    root: str
    """As the user says it: a directory, a hub id or a url."""
    path: str = ""
    """The directory on this disk; empty as long as it was not looked for."""
    base: str | None = None
    """What the model that it belongs to is called."""
    is_3d: bool = False
    within: tuple[str, ...] = ()
    """Where its files must lie, if it was a client who named it."""
    is_leaving: bool = False
    """It is being unloaded: those who have it are still answered."""

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
    """Why it cannot be the name of an adapter; empty if it can."""
    if not 0 < len(name) <= MAX_NAME:
        return f"the name of an adapter has 1 to {MAX_NAME} characters, not {len(name)}"
    return "" if name.isprintable() else f"{name!r:.80} is no name: it must be printable"


def read_modules(values: Iterable[str]) -> tuple[Module, ...]:
    """What --lora-modules says; a ConfigError that names what is wrong."""
    found: dict[str, Module] = {}
    for value in values:
        for module in _read(value):
            if problem := name_problem(module.name):
                raise ConfigError(f"lora_modules: {problem}")
            if module.name in found:
                raise ConfigError(f"lora_modules: two adapters have the name {module.name!r}")
            found[module.name] = module
    return tuple(found.values())


def check_modules(modules: Sequence[Module], *, enabled: bool, served: Sequence[str]) -> None:
    """That they can be had beside a model of these names."""
    if modules and not enabled:
        raise ConfigError("lora_modules needs enable_lora: give --enable-lora, too")
    for module in modules:
        if module.name in served:
            raise ConfigError(
                f"lora_modules: {module.name!r} is the name of the model; give the adapter another one, or "
                "the model, with --served-model-name"
            )


def _read(value: str) -> list[Module]:
    if value.lstrip().startswith(("{", "[")):
        try:
            entries = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"lora_modules: {value!r:.200} is no valid JSON: {error}") from None
        return [_entry(each) for each in (entries if isinstance(entries, list) else [entries])]
    name, equals, path = value.partition("=")
    if not equals or not path:
        raise ConfigError(
            f"lora_modules: {value!r:.200} must be name=path, or JSON such as "
            '\'{"name": "a", "path": "/adapters/a"}\''
        )
    return [Module(name.strip(), path)]


def _entry(entry: Any) -> Module:
    if not isinstance(entry, dict) or not {"name", "path"} <= entry.keys():
        raise ConfigError(f"lora_modules: {entry!r:.200} must be an object with `name` and `path`")
    for field, value in entry.items():
        if field not in _FIELDS:
            raise ConfigError(f"lora_modules: unknown field {field!r}; known: {', '.join(_FIELDS)}")
        if not isinstance(value, str) and not (field == "base_model_name" and value is None):
            raise ConfigError(f"lora_modules: {field} must be a text, not {value!r:.80}")
    if not entry["path"]:
        raise ConfigError(f"lora_modules: the path of {entry['name']!r} is empty")
    return Module(entry["name"], entry["path"], base=entry.get("base_model_name"))
