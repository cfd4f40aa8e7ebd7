"""Tables of classes by name that are imported on first use."""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.errors import ConfigError, one_line

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class LazyTable(Mapping[str, Any]):
    """Table of `"module:Class"` strings by name. An unknown name is a ConfigError that lists the known
    names."""

    def __init__(self, kind: str, entries: dict[str, Any]) -> None:
        self.kind = kind
        self.entries = entries
        """Entries by name: `"module:Class"`, or an object that a plugin has registered."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self.entries))}")
        entry = self.entries[name]
        return _import(entry) if isinstance(entry, str) else entry

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def register(self, name: str, target: Any) -> None:
        """Set the entry of a name: `"module:Class"`, which is imported on first use, or the object itself."""
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"{self.kind}: the name must be a string with at least one character, not {name!r}"
            )
        self.entries[name] = check_target(f"{self.kind} {name!r}", target)


def check_target(what: str, target: Any) -> Any:
    """Return `target` if it is an object that can be called, or a string `"module:Class"`; otherwise raise.
    `what` names the entry in the error."""
    if isinstance(target, str) and not _TARGET.fullmatch(target):
        raise ConfigError(f"the {what} is registered as {target!r}, expected 'module:Class'")
    if not isinstance(target, str) and not callable(target):
        kind = type(target).__name__
        raise TypeError(
            f"the {what} is registered as a value of type {kind}, expected 'module:Class' or a class"
        )
    return target


def imported_on_call(what: str, target: Any) -> Callable[..., Any]:
    """Return a function that calls `target`; a string `"module:function"` is imported at the first call."""
    if not isinstance(check_target(what, target), str):
        function: Callable[..., Any] = target
        return function
    return lambda *args, **kwargs: _import(target)(*args, **kwargs)


def _import(target: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if module.partition(".")[0] == "quire":
            raise
        raise ConfigError(
            f"a plugin has registered {target!r}, which cannot be imported: {one_line(error)}"
        ) from error
