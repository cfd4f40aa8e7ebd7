"""Locations of adapters: directories, hub ids and URLs. Remote adapters are downloaded."""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from quire.checkpoint.hub import fetch_adapter
from quire.checkpoint.object_store import StoreFolder, is_offline, is_url
from quire.errors import ConfigError, RequestError
from quire.server.http.errors import Forbidden, NotFound

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Tokenizer files of an adapter that adds tokens."""
_UNSAFE = re.compile(r"[%?#\\\s]|/\.{1,2}(/|$)")
"""Parts of a URL with which a server could return something outside of the allowed root."""
_NUM_READERS = 4
"""Parallel reads of one download: each holds a chunk in the memory of the API process."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class LoRALocations:
    """Downloads adapters and decides which ones clients may request. All methods may block for long."""

    def __init__(
        self, *, roots: Sequence[str] = (), hub: Sequence[str] = (), cache: Path, max_bytes: int
    ) -> None:
        """Set what clients may request: adapters below `roots` (directories, URLs), and those with a hub id
        or an organization in `hub`. A download to the directory `cache` may have `max_bytes`."""
        self._folders = [resolve_path(root) for root in roots if not is_url(root)]
        self._urls = [root.rstrip("/") + "/" for root in roots if is_url(root)]
        self._hub = frozenset(id.removesuffix("/*") for id in hub)
        self._cache, self._max_bytes = cache, max_bytes

    def for_operator(self, location: str) -> Path:
        """Return the local directory of an adapter that the command line names."""
        if is_url(location):
            return self._download(location)
        folder = resolve_path(location)
        if not os.path.exists(folder) and _HUB_ID.fullmatch(location):
            return self._from_hub(location)
        return _check_adapter(folder, location)

    def for_client(self, location: str) -> Path:
        """Return the local directory of an adapter that a client names, if its location is allowed."""
        if is_url(location):
            if _UNSAFE.search(location) or not any(location.startswith(root) for root in self._urls):
                raise self._forbidden(location)
            return self._download(location)
        folder = resolve_path(location)
        if not os.path.exists(folder) and self.allows_hub_id(location):
            return self._from_hub(location)
        if not self._may_read(folder):
            raise self._forbidden(location)
        path = _check_adapter(folder, location)
        if not all(self._may_read(resolve_path(str(path / file))) for file in (CONFIG, *WEIGHTS)):
            raise self._forbidden(location)  # a file is a symbolic link out of the roots
        return path

    def bounds(self, path: Path) -> tuple[str, ...]:
        """Return the directories that must contain the files of a client's adapter when they are opened,
        since a symbolic link may be added after the check. The result is empty for downloaded adapters."""
        return tuple(map(str, self._folders)) if self._may_read(path) else ()

    def allows_hub_id(self, location: str) -> bool:
        """Whether `location` is a hub id that clients may request."""
        return bool(_HUB_ID.fullmatch(location)) and bool(self._hub & {location, location.partition("/")[0]})

    def _may_read(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)

    def _forbidden(self, location: str) -> Forbidden:
        return Forbidden(
            f"adapters may not be read from {location!r:.200}: it is outside of the allowed locations "
            "(--lora-roots)",
            param="lora_path",
        )

    def _from_hub(self, id: str) -> Path:
        try:
            return _check_adapter(fetch_adapter(id, partial(self._check_size, id)), id)
        except ConfigError as error:
            raise NotFound(str(error), param="lora_path") from None

    def _download(self, url: str) -> Path:
        """Download an adapter from a URL and return its local directory, which is specific to the current
        state of the remote files."""
        names = (CONFIG, *WEIGHTS, *TOKENIZER)
        try:
            folder = StoreFolder(
                url, self._cache, names=names, offline=is_offline(), num_readers=_NUM_READERS
            )
            weights = [name for name in WEIGHTS if name in folder.files][:1]
            if CONFIG not in folder.files or not weights:
                raise no_adapter_error(url, WEIGHTS[0] if CONFIG in folder.files else CONFIG)
            files = [CONFIG, *weights, *(name for name in TOKENIZER if name in folder.files)]
            # Ranged reads never read more than the reported size.
            self._check_size(url, sum(folder.files[name].num_bytes for name in files))
            path = folder.download(files)
            folder.remember(replace=True)
        except ConfigError as error:
            kind = NotFound if is_offline() else RequestError
            raise kind(str(error), param="lora_path") from None
        return path

    def _check_size(self, location: str, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestError(
                f"the adapter at {location!r:.200} has {num_bytes} bytes or more, above the "
                f"{self._max_bytes} of --lora-max-download-bytes",
                param="lora_path",
            )


def resolve_path(location: str) -> Path:
    """Return the path without links and `..`; the path need not exist."""
    try:
        return Path(location.removeprefix("file://")).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # too long, circular links, a NUL byte, an unknown home
        raise no_adapter_error(location) from None


def no_adapter_error(location: str, file: str = CONFIG) -> NotFound:
    return NotFound(f"No adapter found for {location!r:.200}: there is no {file}", param="lora_path")


def _check_adapter(folder: Path, location: str) -> Path:
    if not os.path.isfile(folder / CONFIG):  # pathlib raises if the name is too long
        raise no_adapter_error(location)
    return folder
