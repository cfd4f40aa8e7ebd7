"""API keys: plain keys, or a file of keys with names, weights and limits (docs/keys.md)."""

import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from quire.data.latency_target import LatencyTarget
from quire.errors import ConfigError, nearest

FILES = (".json", ".toml", ".yaml", ".yml")
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Key:
    """An accepted API key. Of the key itself, only the SHA-256 digest is stored."""

    digest: bytes = field(repr=False)
    name: str = ""
    """Name of a key from a file; a plain key has an empty name and no limits."""
    weight: float = 1.0
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    cache_group: str = ""
    """Group of keys that share cached prefixes and media. A named key without a group shares them with no
    other key."""
    operator: bool = False
    """Whether the key may load and unload models."""

    slo_ttft_ms: float | None = None
    """Latency targets of the key's requests in milliseconds: `slo_ttft_ms` for the time to first token,
    `slo_itl_ms` for the inter-token latency. None: those of the server."""
    slo_itl_ms: float | None = None

    @property
    def target(self) -> LatencyTarget | None:
        if self.slo_ttft_ms is None and self.slo_itl_ms is None:
            return None
        return LatencyTarget.of(self.slo_ttft_ms, self.slo_itl_ms)

    @property
    def cache_scope(self) -> str:
        """Return the name of the scope within which requests share cached prefixes and media. All plain keys
        have the empty scope."""
        if not self.name:
            return ""
        return f"group {self.cache_group}" if self.cache_group else f"key {self.name}"


def key_names(keys: Iterable[Key]) -> list[str]:
    """Return the names of the keys that have one; the index of a name is the number of the key's account."""
    return [key.name for key in keys if key.name]


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---- reading


def read_keys(values: Iterable[str]) -> tuple[Key, ...]:
    """Return the API keys for the values of the option `api_key`. A value that starts with `@` or has a
    suffix in `FILES` is the path of a file of keys; any other value is a key."""
    keys: list[Key] = []
    for value in values:
        if value.startswith("@") or value.lower().endswith(FILES):
            keys += _read_file(Path(value.removeprefix("@")).expanduser())
        elif value:
            keys.append(Key(digest(value.encode())))
        else:
            raise ConfigError("api_key is empty: any client could use it")
    names = key_names(keys)
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"api_key: two keys have the name {name!r}; names must be unique")
    counts = Counter(key.digest for key in keys)
    repeated = [key.name or "a plain key" for key in keys if counts[key.digest] > 1]
    if names and repeated:
        raise ConfigError(f"api_key: the same key is given as {' and '.join(repeated)}")
    return tuple(keys)


def _read_file(path: Path) -> list[Key]:
    """Read a file of keys. Errors never quote its content, which is secret."""
    try:
        content = _parse(path, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"api_key: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key: {path} is not text in UTF-8") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(entries, list) or not entries:
        raise ConfigError(f"api_key: {path} must hold a list `keys` with at least one key")
    if unknown := [name for name in content if name != "keys"]:
        raise ConfigError(f"api_key: {path}: unknown field {unknown[0]!r} beside `keys`")
    return [_read_key(f"api_key: {path}: keys[{index}]", entry) for index, entry in enumerate(entries)]


def _parse(path: Path, text: str) -> Any:
    kind = path.suffix.lower()
    try:
        if kind == ".toml":
            return tomllib.loads(text)
        if kind in (".yaml", ".yml"):
            import yaml  # slow to import, and rarely needed

            return yaml.safe_load(text)
        return json.loads(text)
    except Exception as error:  # yaml raises exceptions of several classes
        where = getattr(error, "lineno", None) or getattr(getattr(error, "problem_mark", None), "line", None)
        error_place = f" near line {where}" if where else ""
        raise ConfigError(f"api_key: {path} is not valid {kind[1:].upper() or 'JSON'}{error_place}") from None


_FIELDS = ("name", "key", *(item.name for item in fields(Key) if item.name not in ("name", "digest")))


def _read_key(where: str, entry: Any) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object with `name` and `key`")
    for field_name in entry:
        if field_name not in _FIELDS:
            # The field name may be a secret, if name and value were swapped: show it only if it is a typo.
            shown = (
                f" {field_name!r}{nearest(field_name, _FIELDS)}" if nearest(str(field_name), _FIELDS) else ""
            )
            raise ConfigError(f"{where}: unknown field{shown}; known: {', '.join(_FIELDS)}")
    name, key, weight = entry.get("name"), entry.get("key"), entry.get("weight", 1.0)
    if not _is_name(name):
        raise ConfigError(f"{where}: name must be a text of 1 to {_MAX_NAME} printable characters")
    where = f"{where} ({name!r})"
    if not isinstance(key, str) or not key or key != key.strip() or not key.isprintable():
        raise ConfigError(f"{where}: key must be a text without spaces around it")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1e6:
        raise ConfigError(f"{where}: weight is {_shown(weight)}, expected a number above 0, at most 1000000")
    if (group := entry.get("cache_group")) is not None and not _is_name(group):
        raise ConfigError(f"{where}: cache_group must be a text of 1 to {_MAX_NAME} printable characters")
    if not isinstance(operator := entry.get("operator", False), bool):
        raise ConfigError(f"{where}: operator is {_shown(operator)}, expected true or false")
    for limit in ("max_concurrency", "tokens_per_minute"):
        value = entry.get(limit)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}: {limit} is {_shown(value)}, expected an integer of at least 1")
    for target in ("slo_ttft_ms", "slo_itl_ms"):
        value = entry.get(target)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e9
        ):
            raise ConfigError(f"{where}: {target} is {_shown(value)}, expected milliseconds above 0")
    return Key(
        digest(key.encode()),
        name,
        float(weight),
        entry.get("max_concurrency"),
        entry.get("tokens_per_minute"),
        group or "",
        operator,
        entry.get("slo_ttft_ms"),
        entry.get("slo_itl_ms"),
    )


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME and value.isprintable()


def _shown(value: Any) -> str:
    """Return the text of a number, or the type of any other value, which might be a secret."""
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
