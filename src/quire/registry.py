"""Tables of classes by name that are imported on first use."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from quire.errors import ConfigError


class LazyTable(Mapping[str, Any]):
    """Table of `"module:Class"` strings by name. An unknown name is a ConfigError that lists the known
    names."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self.entries = entries

    def __getitem__(self, name: str) -> Any:
        if name not in self.entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self.entries))}")
        module, _, attribute = self.entries[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
