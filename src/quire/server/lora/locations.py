"""Where adapters may come from: directories, hub ids, urls; what is elsewhere is brought to this disk."""

import hashlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from quire.checkpoint.hub import fetch_adapter
from quire.errors import ConfigError, RequestError
from quire.server.http.errors import Forbidden, NotFound

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Of an adapter that brings tokens."""
_URL = re.compile(r"[a-zA-Z][\w+.-]*://[^:]+(:\d+)?[^:]*")
"""Not those with `::`, which name a file inside a file."""
_ODD = re.compile(r"[%?#\\\s]|/\.{1,2}(/|$)")
"""What a server may take for something else than the name of a folder below a root."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_MAX_SAID = 200
_CHUNK_BYTES = 1 << 20


class LoRALocations:
    """Brings adapters to this disk, and knows which of them a client may ask for. All calls may take long."""

    def __init__(
        self, *, roots: Sequence[str] = (), hub: Sequence[str] = (), cache: Path, max_bytes: int
    ) -> None:
        """`roots`: directories and urls; `hub`: ids, or organizations; `max_bytes` of one download."""
        self._folders = [resolved(root) for root in roots if not is_url(root)]
        self._urls = [root.rstrip("/") + "/" for root in roots if is_url(root)]
        self._hub = frozenset(each.removesuffix("/*") for each in hub)
        self._cache, self._max_bytes = cache, max_bytes

    def for_operator(self, place: str) -> Path:
        """The directory of an adapter that the command line names."""
        if is_url(place):
            return self._download(place)
        folder = resolved(place)
        if not os.path.exists(folder) and _HUB_ID.fullmatch(place):
            return self._from_hub(place)
        return _checked(folder, place)

    def for_client(self, place: str) -> Path:
        """The same, of one that a client names: only from where that is allowed."""
        if is_url(place):
            if _ODD.search(place) or not any(place.startswith(root) for root in self._urls):
                raise self._outside(place)
            return self._download(place)
        folder = resolved(place)
        if not os.path.exists(folder) and self.has_hub(place):
            return self._from_hub(place)
        if not self._may_read(folder):
            raise self._outside(place)
        found = _checked(folder, place)
        for file in (CONFIG, *WEIGHTS):
            if not self._may_read(resolved(str(found / file))):  # a link to somewhere else
                raise self._outside(place)
        return found

    def bounds(self, path: Path) -> tuple[str, ...]:
        """Where the files of a client's adapter must lie when they are opened: a link may be put there after
        it was found. Nothing of what was brought to this disk."""
        return tuple(map(str, self._folders)) if self._may_read(path) else ()

    def has_hub(self, place: str) -> bool:
        """Whether it is an id of the hub that a client may ask for."""
        return bool(_HUB_ID.fullmatch(place)) and bool(self._hub & {place, place.partition("/")[0]})

    def _may_read(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)

    def _outside(self, place: str) -> Forbidden:
        return Forbidden(
            f"adapters may not be read from {place!r:.200}: it is outside of what the server allows "
            "(--lora-roots)",
            param="lora_path",
        )

    def _from_hub(self, id: str) -> Path:
        try:
            return _checked(fetch_adapter(id, partial(self._check_size, id)), id)
        except ConfigError as error:
            raise NotFound(str(error), param="lora_path") from None

    def _download(self, url: str) -> Path:
        """Into a directory of its own for each state of what is there."""
        fs, base = _opened(url)
        try:
            fs.invalidate_cache()  # of what was there when somebody looked last
            names = (CONFIG, *WEIGHTS, *TOKENIZER)
            found = {name: _info(fs, f"{base.rstrip('/')}/{name}") for name in names}
        except Exception as error:  # every store has its own
            raise _unreachable(url, error) from None
        there = [name for name, info in found.items() if info.get("type") == "file"]
        weights = [name for name in WEIGHTS if name in there][:1]
        if CONFIG not in there or not weights:
            raise missing(url)
        wanted = [CONFIG, *weights, *(name for name in TOKENIZER if name in there)]
        num_bytes = sum(int(found[name].get("size") or 0) for name in wanted)
        self._check_size(url, num_bytes)
        state = repr([url, *(sorted(found[name].items(), key=str) for name in wanted)])
        folder = self._cache / hashlib.sha256(state.encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for name in wanted:
                if not (folder / name).exists():
                    self._copy(fs, f"{base.rstrip('/')}/{name}", folder / name)
        return folder

    def _copy(self, fs: Any, source: str, target: Path) -> None:
        new, num_bytes = target.with_name(f"{target.name}.new"), 0
        try:
            with fs.open(source, "rb") as file, new.open("wb") as out:
                while num_bytes <= self._max_bytes and (chunk := file.read(_CHUNK_BYTES)):
                    num_bytes += out.write(chunk)
        except Exception as error:
            raise _unreachable(source, error) from None
        self._check_size(source, num_bytes)  # the store may have said something else of it
        new.replace(target)

    def _check_size(self, place: str, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestError(
                f"the adapter at {place!r:.200} has {num_bytes} bytes or more, above the {self._max_bytes} "
                "of --lora-max-download-bytes",
                param="lora_path",
            )


def is_url(place: str) -> bool:
    return bool(_URL.fullmatch(place)) and not place.startswith("file://")


def resolved(place: str) -> Path:
    """Without links and `..`, whether it is there or not."""
    try:
        return Path(place.removeprefix("file://")).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # too long, a circle of links, a zero byte, nobody's home
        raise missing(place) from None


def missing(place: str) -> NotFound:
    return NotFound(f"No adapter found for {place!r:.200}", param="lora_path")


def _checked(folder: Path, place: str) -> Path:
    if not os.path.isfile(folder / CONFIG):  # pathlib raises if the name is too long
        raise missing(place)
    return folder


def _opened(url: str) -> tuple[Any, str]:
    try:
        import fsspec

        fs, base = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise RequestError(
            f"{url!r:.200} cannot be read: {error}; install what its kind of url needs (s3://: s3fs)",
            param="lora_path",
        ) from None
    except Exception as error:  # no such kind of url, or no way in
        raise _unreachable(url, error) from None
    return fs, str(base)


def _info(fs: Any, file: str) -> dict[str, Any]:
    """Size, time and tag, as far as the store tells them; empty if there is no such file."""
    try:
        return dict(fs.info(file))
    except FileNotFoundError:
        return {}


def _unreachable(url: str, error: Exception) -> RequestError:
    said = " ".join(str(error).split())[:_MAX_SAID]
    return RequestError(f"{url!r:.200} cannot be read: {type(error).__name__}: {said}", param="lora_path")
