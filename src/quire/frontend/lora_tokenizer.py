"""`OwnTokenizers`: the model's tokenizer with the tokens that an adapter brings."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import tokenizers
from tokenizers import AddedToken

from quire.data.lora import LoRARequest
from quire.data.lru import Lru
from quire.errors import RequestError
from quire.logs import get_logger, warn_once
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_MAX_BYTES = 64 << 20
_MAX_KEPT = 1024
"""Adapters of which it is known whether they bring tokens."""


class _Added(msgspec.Struct, frozen=True, order=True):
    """A token as tokenizer.json has it."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False

    def token(self) -> AddedToken:
        kinds = {name: getattr(self, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        return AddedToken(self.content, special=self.special, **kinds)


class _Vocabulary(msgspec.Struct):
    added_tokens: list[_Added] = []


class OwnTokenizers:
    """Tokenizers of adapters. One that has no tokens beyond the model's has the model's tokenizer; those with
    the same tokens share one. May be asked in any thread."""

    def __init__(self, base: Tokenizer) -> None:
        self._base = base
        self._known: Lru[Tokenizer] = Lru(_MAX_KEPT)
        """By path, and the state of the files there."""
        self._made: WeakValueDictionary[tuple[Any, ...], Tokenizer] = WeakValueDictionary()

    def of(self, lora: LoRARequest) -> Tokenizer:
        folder = Path(lora.path)
        state = [_state(folder / name) for name in (_TOKENIZER, _CONFIG, _TEMPLATE)]
        key = repr((lora.path, lora.within, state)).encode()
        found = self._known.get(key)
        if found is None:
            found = self._read(lora, folder)
            self._known.put(key, found, 1)
        return found

    def _read(self, lora: LoRARequest, folder: Path) -> Tokenizer:
        base = self._base
        try:
            written = _contents(folder / _TOKENIZER, lora.within)
            listed = msgspec.json.decode(written, type=_Vocabulary).added_tokens if written else []
            config = msgspec.json.decode(
                _contents(folder / _CONFIG, lora.within) or b"{}", type=dict[str, Any]
            )
            template = _contents(folder / _TEMPLATE, lora.within).decode() or config.get("chat_template")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(f"the tokenizer of {lora.name!r}: {error}", param="model") from None
        new = sorted(each for each in listed if base.backend.token_to_id(each.content) is None)
        if not new:
            return base
        names = {name: text for name in base.special_tokens_map if (text := _text(config.get(name)))}
        template = template if isinstance(template, str) else None
        made = (*new, *names.items(), template)
        found = self._made.get(made)
        if found is None:
            found = self._made[made] = _extended(base, new, names, template)
        if any(found.backend.token_to_id(each.content) != each.id for each in new):
            warn_once(log, f"adapter {lora.name!r} has a tokenizer that is not the model's with more tokens")
            return base
        return found


def _extended(
    base: Tokenizer, new: Sequence[_Added], names: dict[str, str], template: str | None
) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(base.backend.to_str())
    for each in new:
        backend.add_special_tokens([each.token()]) if each.special else backend.add_tokens([each.token()])
    known = {name: text for name, text in names.items() if backend.token_to_id(text) is not None}
    return Tokenizer(
        backend,
        special_tokens=base.special_tokens_map | known,
        chat_template=template or base.chat_template,
    )


def _text(entry: Any) -> str | None:
    found = entry.get("content") if isinstance(entry, dict) else entry
    return found if isinstance(found, str) else None


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _contents(path: Path, within: Sequence[str]) -> bytes:
    """Empty if it is not there, or no file. What was opened is what is checked and read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return b""
    with os.fdopen(fd, "rb") as file:
        real = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if within and not any(real.is_relative_to(root) for root in within):
            raise RequestError(
                f"{path.name} is a link to what is outside of the directories that are allowed"
            )
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return b""
        if found.st_size > _MAX_BYTES:
            raise RequestError(f"{path.name} has {found.st_size} bytes, above {_MAX_BYTES}")
        return file.read()
