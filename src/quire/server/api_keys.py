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
from quire.metrics.api_keys import KeyAccount, KeyPages

FILES = (".json", ".toml", ".yaml", ".yml")
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Key:
    """An accepted API key. Only its digest is kept."""

    digest: bytes = field(repr=False)
    name: str = ""
    """Name of a key from a file; a plain key has an empty name and no limits."""
    weight: float = 1.0
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    cache_group: str = ""
    """Keys of one group share cached prefixes and media; a key without one shares them with no other."""

    @property
    def cache_scope(self) -> str:
        """Return the cache scope of the key's requests; all plain keys share one."""
        if not self.name:
            return ""
        return f"group {self.cache_group}" if self.cache_group else f"key {self.name}"


def key_names(keys: Iterable[Key]) -> list[str]:
    """Return the names of the named keys, in the order of their numbers."""
    return [key.name for key in keys if key.name]


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---- reading


def read_keys(values: Iterable[str]) -> tuple[Key, ...]:
    """Return the keys of the `api_key` values. A value that starts with `@` or ends in one of `FILES` is the
    path of a file of keys."""
    keys: list[Key] = []
    for value in values:
        if value.startswith("@") or value.lower().endswith(FILES):
            keys += _read_file(Path(value.removeprefix("@")).expanduser())
        elif value:
            keys.append(Key(digest(value.encode())))
        else:
            raise ConfigError("api_key is empty: any client could use it")
    names = [key.name for key in keys if key.name]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"api_key: two keys have the name {name!r}; names must be unique")
    if any(key.name for key in keys) and len({key.digest for key in keys}) < len(keys):
        labels = [key.name or "a plain key" for key in keys]
        same = [name for name, key in zip(labels, keys, strict=True) if _count_equal(key, keys) > 1]
        raise ConfigError(f"api_key: the same key is given as {' and '.join(same)}")
    return tuple(keys)


def _count_equal(key: Key, keys: Sequence[Key]) -> int:
    return sum(key.digest == other.digest for other in keys)


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
    return [_read_key(f"api_key: {path}: keys[{place}]", entry) for place, entry in enumerate(entries)]


def _parse(path: Path, text: str) -> Any:
    kind = path.suffix.lower()
    try:
        if kind == ".toml":
            return tomllib.loads(text)
        if kind in (".yaml", ".yml"):
            import yaml  # slow to import, and rarely needed

            return yaml.safe_load(text)
        return json.loads(text)
    except Exception as error:  # yaml raises several classes
        where = getattr(error, "lineno", None) or getattr(getattr(error, "problem_mark", None), "line", None)
        at = f" near line {where}" if where else ""
        raise ConfigError(f"api_key: {path} is not valid {kind[1:].upper() or 'JSON'}{at}") from None


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
    """Return the text of a number, or the type of any other value, which might be a secret."""
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


# ---- limits


class Refusal(NamedTuple):
    """Reason for a 429 response, and the seconds to wait."""

    message: str
    retry_after_s: int


class Ledger:
    """The keys of a server, with their open requests and used tokens over all API processes.

    tokens_per_minute is a token bucket that fills in a minute. A request is admitted while the bucket is not
    empty. Its prompt is deducted when it was tokenized, its output as it is generated. The bucket may
    therefore become negative, and no request is admitted until it is positive again.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        pages: KeyPages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize the accounts; `clock` must be the same in all processes."""
        self.keys = tuple(keys)
        named = [key for key in self.keys if key.name]
        self._pages = pages or KeyPages(key_names(keys))
        self._numbers = {key.digest: number for number, key in enumerate(named)}
        self._accounts = [KeyAccount(number, key.weight, self._pages) for number, key in enumerate(named)]
        self._clock = clock

    def find(self, sent: bytes) -> Key | None:
        """Return the matching key. All keys are compared, so the time does not depend on which one
        matches."""
        sent_digest, match = digest(sent), None
        for key in self.keys:
            if hmac.compare_digest(sent_digest, key.digest):
                match = key
        return match

    def account(self, key: Key) -> KeyAccount | None:
        return self._accounts[self._numbers[key.digest]] if key.name else None

    def enter(self, key: Key, *, tokenless: bool = False) -> Refusal | None:
        """Admit a request, which must call `leave` at its end, or return why it is refused. A `tokenless`
        request does not use the model and is exempt from tokens_per_minute."""
        if not key.name:
            return None
        number, pages = self._numbers[key.digest], self._pages
        if key.max_concurrency is None and key.tokens_per_minute is None:
            pages.add(number, "requests")
            pages.add(number, "running")
            return None
        with pages.agreed(number) as common:
            refused = self._check_concurrency(key, number)
            if refused is None and not tokenless:
                refused = self._check_tokens(key, number, common)
            for what in ("requests", "running") if refused is None else refused[:1]:
                pages.add(number, what)
        return None if refused is None else refused[1]

    def leave(self, key: Key) -> None:
        if key.name:
            self._pages.add(self._numbers[key.digest], "running", -1)

    def _check_concurrency(self, key: Key, number: int) -> tuple[str, Refusal] | None:
        most = key.max_concurrency
        if most is None or self._pages.total(number, "running") < most:
            return None
        return "concurrency", Refusal(
            f"Rate limit of key {key.name!r}: max_concurrency is {most}, and {most} of its requests are "
            "being answered. Try again when one of them has ended, in 1 s at the earliest.",
            1,
        )

    def _check_tokens(self, key: Key, number: int, common: Any) -> tuple[str, Refusal] | None:
        """Check tokens_per_minute. `common` holds the tokens granted since the start and the time of the last
        grant."""
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
