"""Typed access to the configuration files of a model."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, UnsupportedSetting


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


class ConfigReader:
    """Typed access to a JSON object or a GGUF header: a wrong value raises a ConfigError with its key."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def but(self, **changes: Any) -> "ConfigReader":
        """Return a copy of the reader in which some values are replaced."""
        return ConfigReader(self.source, {**self.values, **changes})

    def defaults(self, **values: Any) -> "ConfigReader":
        """Return a copy of the reader that has these values where the configuration has none."""
        return self.but(**{key: value for key, value in values.items() if self.get(key) is None})

    def renamed(self, names: Mapping[str, str]) -> "ConfigReader":
        """Return a copy with values also under new keys; `names` maps old keys to new ones. Values under old
        keys have precedence."""
        return self.but(**{new: self.get(old) for old, new in names.items() if self.get(old) is not None})

    def require(self, key: str, value: Any) -> None:
        """Raise if the key is set to anything but `value`, the only supported value."""
        if self.get(key) not in (None, value):
            raise UnsupportedSetting(str(self.wrong(key, f"{value} (nothing else is supported)")), key)

    def wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.source}: {key} is {self.values.get(key)!r}, expected {expected}")

    def _present(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise ConfigError(f"{self.source}: the key {key} is missing")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer below 2**31; raise if the key is missing and there is no default."""
        value = self._present(key) if default is None else self.values.get(key)
        if value is None:
            assert default is not None
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self.wrong(key, "a positive integer below 2**31")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Return an integer of 0 or more, such as a number of layers or the index of a layer."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, "an integer of 0 or more")
        return value

    def any_number(self, key: str) -> float:
        """Return a number of either sign, as it is stored."""
        value: Any = self._present(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number; raise if the key is missing and there is no default."""
        value = self._present(key) if default is None else self.values.get(key)
        if value is None:
            assert default is not None
            return default
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not 0 < value <= sys.float_info.max
        ):
            raise self.wrong(key, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def integers(self, key: str) -> list[int]:
        """Return a list of integers, which is empty if the key is missing."""
        value = self.values.get(key)
        numbers = [] if value is None else value
        if not isinstance(numbers, list) or not all(isinstance(entry, int) for entry in numbers):
            raise self.wrong(key, "a list of integers")
        return numbers

    def names(self, key: str) -> list[str]:
        """Return a list of strings, which is empty if the key is missing."""
        names = self.values.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.wrong(key, "a list of names")
        return names

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one id or a list of ids as a tuple without repeats; empty if the key is missing."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))
