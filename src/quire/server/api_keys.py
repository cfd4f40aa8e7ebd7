"""The keys of the API: plain ones, or a file of keys with names, weights and limits (docs/keys.md)."""

import hashlib
import hmac
import json
import math
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from quire.errors import ConfigError, nearest
from quire.metrics.keys import KeyAccount, KeyPages

FILES = (".json", ".toml", ".yaml", ".yml")
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Key:
    """A key that is let in. The key itself is not kept, only what it is recognized by."""

    digest: bytes = field(repr=False)
    name: str = ""
    """Of one out of a file; a plain one has none, and no limits."""
    weight: float = 1.0
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    cache_group: str = ""
    """Keys of one group share cached prefixes and media; a key without one shares them with no other."""

    @property
    def cache_scope(self) -> str:
        """The scope of the caches of its requests; plain keys, which have no name, share one."""
        if not self.name:
            return ""
        return f"group {self.cache_group}" if self.cache_group else f"key {self.name}"


def key_names(keys: Iterable[Key]) -> list[str]:
    """In the order of their numbers."""
    return [key.name for key in keys if key.name]


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---- reading


def read_keys(values: Iterable[str]) -> tuple[Key, ...]:
    """The keys that are given, and those in the files: a value that starts with `@` or ends like a file of
    keys is the path of one."""
    keys: list[Key] = []
    for value in values:
        if value.startswith("@") or value.lower().endswith(FILES):
            keys += _read_file(Path(value.removeprefix("@")).expanduser())
        elif value:
            keys.append(Key(digest(value.encode())))
        else:
            raise ConfigError("api_key is empty: everybody would have it")
    names = [key.name for key in keys if key.name]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"api_key: two keys have the name {name!r}; a name tells keys apart")
    if any(key.name for key in keys) and len({key.digest for key in keys}) < len(keys):
        told = [key.name or "a plain one" for key in keys]
        same = [name for name, key in zip(told, keys, strict=True) if _times(key, keys) > 1]
        raise ConfigError(f"api_key: the same key is given as {' and '.join(same)}")
    return tuple(keys)


def _times(key: Key, keys: Sequence[Key]) -> int:
    return sum(key.digest == each.digest for each in keys)


def _read_file(path: Path) -> list[Key]:
    """No error may quote what the file holds: it is made of secrets."""
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
    return [_key(f"api_key: {path}: keys[{place}]", entry) for place, entry in enumerate(entries)]


def _parse(path: Path, text: str) -> Any:
    kind = path.suffix.lower()
    try:
        if kind == ".toml":
            return tomllib.loads(text)
        if kind in (".yaml", ".yml"):
            import yaml  # slow to import, and rarely needed

            return yaml.safe_load(text)
        return json.loads(text)
    except Exception as error:  # yaml's are of many kinds
        where = getattr(error, "lineno", None) or getattr(getattr(error, "problem_mark", None), "line", None)
        at = f" near line {where}" if where else ""
        raise ConfigError(f"api_key: {path} is not valid {kind[1:].upper() or 'JSON'}{at}") from None


_FIELDS = ("name", "key", *(each.name for each in fields(Key) if each.name not in ("name", "digest")))


def _key(where: str, entry: Any) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object with `name` and `key`")
    for given in entry:
        if given not in _FIELDS:
            # Who swaps name and value has written a key where a field belongs.
            shown = f" {given!r}{nearest(given, _FIELDS)}" if nearest(str(given), _FIELDS) else ""
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
    for limit in ("max_concurrency", "tokens_per_minute"):
        value = entry.get(limit)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}: {limit} is {_shown(value)}, expected an integer of at least 1")
    return Key(
        digest(key.encode()),
        name,
        float(weight),
        entry.get("max_concurrency"),
        entry.get("tokens_per_minute"),
        group or "",
    )


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME and value.isprintable()


def _shown(value: Any) -> str:
    """A number; a text might be a key in the wrong place."""
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


# ---- limits


class Refusal(NamedTuple):
    """A request that comes too early."""

    message: str
    retry_after_s: int


class Ledger:
    """The keys of a server, and what each has open and has used, over all of its API processes.

    Tokens are a bucket that fills in a minute. A request is let in while there is something in it, and takes
    what it takes: its prompt when that was read, its answer as it comes. So the bucket may be overdrawn, and
    nothing more is let in until it is paid back; no request is too large for ever.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        pages: KeyPages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` must be the same in all processes."""
        self.keys = tuple(keys)
        named = [key for key in self.keys if key.name]
        self._pages = pages or KeyPages(key_names(keys))
        self._numbers = {key.digest: number for number, key in enumerate(named)}
        self._accounts = [KeyAccount(number, key.weight, self._pages) for number, key in enumerate(named)]
        self._clock = clock

    def find(self, sent: bytes) -> Key | None:
        """The key that was sent. All are compared, whichever fits: the time taken says nothing."""
        wanted, found = digest(sent), None
        for key in self.keys:
            if hmac.compare_digest(wanted, key.digest):
                found = key
        return found

    def account(self, key: Key) -> KeyAccount | None:
        return self._accounts[self._numbers[key.digest]] if key.name else None

    def enter(self, key: Key, *, tokenless: bool = False) -> Refusal | None:
        """Let a request in, which must `leave`, or say why not. One that is `tokenless` asks nothing of the
        model, and is let in however many tokens the key has used."""
        if not key.name:
            return None
        number, pages = self._numbers[key.digest], self._pages
        if key.max_concurrency is None and key.tokens_per_minute is None:
            pages.add(number, "requests")
            pages.add(number, "running")
            return None
        with pages.agreed(number) as common:
            refused = self._too_much(key, number)
            if refused is None and not tokenless:
                refused = self._too_many_tokens(key, number, common)
            for what in ("requests", "running") if refused is None else refused[:1]:
                pages.add(number, what)
        return None if refused is None else refused[1]

    def leave(self, key: Key) -> None:
        if key.name:
            self._pages.add(self._numbers[key.digest], "running", -1)

    def _too_much(self, key: Key, number: int) -> tuple[str, Refusal] | None:
        most = key.max_concurrency
        if most is None or self._pages.total(number, "running") < most:
            return None
        return "concurrency", Refusal(
            f"Rate limit of key {key.name!r}: max_concurrency is {most}, and {most} of its requests are "
            "being answered. Try again when one of them has ended, in 1 s at the earliest.",
            1,
        )

    def _too_many_tokens(self, key: Key, number: int, common: Any) -> tuple[str, Refusal] | None:
        """`common` holds what the key was granted since the start, and when that was last raised."""
        rate = key.tokens_per_minute
        if rate is None:
            return None
        used = sum(self._pages.total(number, what) for what in ("prompt_tokens", "generation_tokens"))
        before, raised_at, now = float(common[0]), float(common[1]), self._clock()
        fresh = rate * (now - raised_at) / 60 if raised_at else rate
        granted = min(used + rate, before + fresh)
        common[:2] = granted, now
        if granted > used:
            return None
        wait_s = max(1, math.ceil((used - granted) * 60 / rate))
        return "tokens", Refusal(
            f"Rate limit of key {key.name!r}: tokens_per_minute is {rate}, and it has used them. Try again "
            f"in {wait_s} s.",
            wait_s,
        )
