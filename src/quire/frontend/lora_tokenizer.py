"""Tokenizers of LoRA adapters: the model's tokenizer with added tokens."""

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
"""Maximum number of adapters with a cached tokenizer."""


class _Added(msgspec.Struct, frozen=True, order=True):
    """An added token of tokenizer.json."""

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


class LoRATokenizers:
    """Tokenizers of LoRA adapters. An adapter without added tokens uses the model's tokenizer; adapters with
    the same added tokens share a tokenizer. Thread-safe."""

    def __init__(self, base: Tokenizer) -> None:
        self._base = base
        self._known: Lru[Tokenizer] = Lru(_MAX_KEPT)
        """Tokenizers by adapter path and state of the adapter's tokenizer files."""
        self._extended: WeakValueDictionary[tuple[Any, ...], Tokenizer] = WeakValueDictionary()

    def of(self, lora: LoRARequest) -> Tokenizer:
        folder = Path(lora.path)
        state = [_state(folder / name) for name in (_TOKENIZER, _CONFIG, _TEMPLATE)]
        key = repr((lora.path, lora.within, state)).encode()
        tokenizer = self._known.get(key)
        if tokenizer is None:
            tokenizer = self._read(lora, folder)
            self._known.put(key, tokenizer, 1)
        return tokenizer

    def _read(self, lora: LoRARequest, folder: Path) -> Tokenizer:
        base = self._base
        try:
            content = _contents(folder / _TOKENIZER, lora.within)
            listed = msgspec.json.decode(content, type=_Vocabulary).added_tokens if content else []
            config = msgspec.json.decode(
                _contents(folder / _CONFIG, lora.within) or b"{}", type=dict[str, Any]
            )
            template = _contents(folder / _TEMPLATE, lora.within).decode() or config.get("chat_template")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(f"the tokenizer of {lora.name!r}: {error}", param="model") from None
        new = sorted(token for token in listed if base.backend.token_to_id(token.content) is None)
        if not new:
            return base
        names = {name: text for name in base.special_tokens_map if (text := _text(config.get(name)))}
        template = template if isinstance(template, str) else None
        key = (*new, *names.items(), template)
        tokenizer = self._extended.get(key)
        if tokenizer is None:
            tokenizer = self._extended[key] = _extend(base, new, names, template)
        if any(tokenizer.backend.token_to_id(token.content) != token.id for token in new):
            warn_once(
                log, f"adapter {lora.name!r} has a tokenizer that does not extend the model's: it is ignored"
            )
            return base
        return tokenizer


def _extend(base: Tokenizer, new: Sequence[_Added], names: dict[str, str], template: str | None) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(base.backend.to_str())
    for new_token in new:
        added = [new_token.token()]
        backend.add_special_tokens(added) if new_token.special else backend.add_tokens(added)
    known = {name: text for name, text in names.items() if backend.token_to_id(text) is not None}
    return Tokenizer(
        backend, special_tokens=base.special_tokens_map | known, chat_template=template or base.chat_template
    )


def _text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.stat()
    except (OSError, ValueError):
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _contents(path: Path, within: Sequence[str]) -> bytes:
    """Return the bytes of a file; empty if it does not exist or is not a regular file. Raise a RequestError
    if the opened file is outside of the folders `within`; without any, all folders are allowed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return b""
    with os.fdopen(fd, "rb") as file:
        real = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if within and not any(real.is_relative_to(root) for root in within):
            raise RequestError(f"{path.name} links to a file outside of the allowed directories")
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return b""
        if info.st_size > _MAX_BYTES:
            raise RequestError(f"{path.name} has {info.st_size} bytes, above {_MAX_BYTES}")
        return file.read()
