"""Files in object stores (s3://, gs:// and other fsspec schemes): listing, parallel download, local cache."""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import ConfigError
from quire.logs import get_logger

logger = get_logger(__name__)
T = TypeVar("T")

CHUNK_BYTES = 16 << 20
"""Bytes of one ranged read."""
NUM_READERS = 16
"""Number of parallel ranged reads; each holds one chunk in memory."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Extra of Quire that installs the fsspec driver, by URL scheme."""
_URL = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*)://[^:]+(:\d+)?[^:]*")
"""Pattern of a supported URL. It has no `::`, which would name a file inside an archive."""
_VERSION_KEYS = (
    *("ETag", "etag", "generation", "md5Hash", "content_md5"),
    *("mtime", "LastModified", "last_modified", "updated", "modified", "created"),
)
"""Keys of fsspec drivers that change with the content of a file, the most reliable first."""
_CREDENTIAL_ERRORS = (
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"),
    *("DefaultCredentialsError", "RefreshError"),
)
"""Class names of botocore's and google-auth's exceptions, which may not be installed."""
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role of the machine "
    "(a public bucket: FSSPEC_S3_ANON=true)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS or run `gcloud auth application-default login` "
    "(a public bucket: FSSPEC_GS_TOKEN=anon)",
}
_MAX_ERROR_CHARS = 200


def is_url(place: str) -> bool:
    return bool(_URL.fullmatch(place)) and not place.startswith("file://")


def download_bar(**settings: Any) -> Any:
    """Return a progress bar of bytes. Outside of a terminal, such as in the log of a container, it prints a
    line every ten seconds."""
    from tqdm import tqdm

    interval_s = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        unit="B", unit_scale=True, mininterval=interval_s, maxinterval=max(interval_s, 10.0), **settings
    )


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set, which applies to all downloads."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file in an object store. If its content changes, its size or version changes, too."""

    name: str
    """Path below the URL."""
    num_bytes: int
    version: str
    """ETag, or the time of the last change where a store has no ETag."""

    @property
    def key(self) -> str:
        """Return the name of the file's copy in the cache."""
        return hashlib.sha256(f"{self.name}\n{self.num_bytes}\n{self.version}".encode()).hexdigest()[:40]


class StoreFolder:
    """The files below one URL, and their copies in the local cache.

    A copy is stored under `blobs` by name, size and version. `snapshots` has one directory of links for each
    listing, so that files of different versions are never mixed. `listing.json` is the newest listing, which
    offline mode uses. One process of a machine downloads at a time; others wait.
    """

    def __init__(
        self,
        url: str,
        cache: Path,
        *,
        names: Sequence[str] | None = None,
        offline: bool = False,
        progress: bool = False,
        num_readers: int | None = None,
    ) -> None:
        """List the files below `url`; with `names`, look up only these. The cache directory is named after
        the URL. `num_readers` is the number of parallel reads, by default NUM_READERS. Raises a ConfigError
        if the store cannot be read."""
        self.url, self._names, self._progress = url.rstrip("/"), names, progress
        self._num_readers = num_readers or NUM_READERS
        self._folder = cache / _folder_name(self.url)
        subset = f"-{hashlib.sha256(repr(list(names)).encode()).hexdigest()[:12]}" if names else ""
        self._saved = self._folder / f"listing{subset}.json"
        self._offline = offline
        if offline:
            self.files = self._read_listing()
            return
        self._fs, self._base = _open_url(self.url)
        self.files = self._list()

    def download(self, names: Collection[str]) -> Path:
        """Return a directory with at least these files, after downloading those that the cache does not have.
        Raises a ConfigError if the store cannot be read, an OSError if the cache cannot be written."""
        files = [self.files[name] for name in names]
        snapshot = self._folder / "snapshots" / self._state()
        if all((snapshot / file.name).exists() for file in files):
            return snapshot
        if self._offline:
            raise self._offline_error()
        with self._lock():
            self._fetch([file for file in files if not self._blob(file).exists()])
            for file in files:
                self._link(snapshot / file.name, self._blob(file))
        return snapshot

    def remember(self, *, replace: bool) -> None:
        """Save the listing for offline mode; an existing listing is replaced only if `replace`."""
        if self._offline or self._read_saved() == self._listing():
            return
        if replace or not self._saved.exists():
            new = self._saved.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self._listing(), indent=1), encoding="utf-8")
            new.replace(self._saved)

    def matching(self, allow: list[str], ignore: Sequence[str] = ()) -> list[str]:
        """Return the file names that match a pattern of `allow` and none of `ignore`, by the rules of the
        Hugging Face hub."""

        def matches(name: str, patterns: Sequence[str]) -> bool:
            return any(fnmatchcase(name, pattern) for pattern in patterns)

        return [name for name in self.files if matches(name, allow) and not matches(name, ignore)]

    def _list(self) -> dict[str, StoredFile]:
        fs, base = self._fs, self._base
        fs.invalidate_cache()  # forget listings of earlier calls
        if self._names is None:
            infos = self._ask(lambda: fs.find(base, detail=True))
            if base in infos:
                raise ConfigError(f"{self.url!r} is one file: give the folder of the model, or a .gguf file")
            objects = {str(path).removeprefix(f"{base}/"): info for path, info in infos.items()}
        else:
            objects = {name: info for name in self._names if (info := self._info(f"{base}/{name}"))}
        is_file = {name: _is_path(name) and info.get("type") == "file" for name, info in objects.items()}
        files = [_stored_file(name, info) for name, info in objects.items() if is_file[name]]
        return {file.name: file for file in sorted(files, key=lambda file: file.name)}

    def _info(self, path: str) -> dict[str, Any]:
        """Return the metadata that the store reports of a file; empty if the file does not exist."""
        try:
            return dict(self._fs.info(path))
        except FileNotFoundError:
            return {}
        except Exception as error:  # each fsspec driver has its own exceptions
            raise _store_error(self.url, error) from None

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # each fsspec driver has its own exceptions
            raise _store_error(self.url, error) from None

    def _fetch(self, files: Sequence[StoredFile]) -> None:
        """Read the chunks of all files in parallel; complete files get their final names. A file that has
        changed in the store meanwhile is discarded, and a ConfigError is raised."""
        if not files:
            return
        blobs = self._folder / "blobs"
        self._remove_stale_parts(blobs)
        parts = [_Part(blobs / file.key, file) for file in files]
        self._check_space(sum(part.num_missing_bytes for part in parts))
        self._read_chunks(parts)
        current = self._list()
        changed = [part for part in parts if current.get(part.file.name) != part.file]
        for part in parts:
            part.discard() if part in changed else part.finish()
        if changed:
            names = ", ".join(part.file.name for part in changed[:3])
            raise ConfigError(f"{self.url!r} changed while it was downloaded ({names}): start again")

    def _read_chunks(self, parts: Sequence["_Part"]) -> None:
        total = sum(part.file.num_bytes for part in parts)
        missing = sum(part.num_missing_bytes for part in parts)
        logger.info("Downloading %d files (%d MB) of %s", len(parts), missing // 10**6, self.url)
        bar = download_bar(total=total, initial=total - missing, disable=not self._progress)
        pool = ThreadPoolExecutor(self._num_readers, thread_name_prefix="store")
        try:
            with bar:
                reads = [pool.submit(self._read, part, *chunk) for part in parts for chunk in part.missing()]
                for read in as_completed(reads):
                    bar.update(read.result())
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, part: "_Part", start: int, end: int) -> int:
        path = f"{self._base}/{part.file.name}"
        past_end = int(end == part.file.num_bytes)  # one more byte, which exists if the file is longer
        data = self._ask(lambda: self._fs.cat_file(path, start=start, end=end + past_end))
        if len(data) != end - start:
            raise ConfigError(
                f"{self.url!r}: {part.file.name!r} does not have the {part.file.num_bytes} bytes that the "
                f"store reports (bytes {start} to {end} are {len(data)} bytes); start again"
            )
        part.write(start, data)
        return len(data)

    def _remove_stale_parts(self, blobs: Path) -> None:
        """Remove unfinished downloads of files that have changed since."""
        blobs.mkdir(parents=True, exist_ok=True)
        keys = {file.key for file in self.files.values()}
        for path in blobs.iterdir():
            if path.suffix in (".part", ".chunks") and path.stem not in keys:
                path.unlink()

    def _check_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if num_bytes > free:
            needed, left = f"{num_bytes / 1e9:.1f} GB", f"{free / 1e9:.1f} GB"
            raise OSError(errno.ENOSPC, f"{needed} more are needed, and {left} of the disk are free")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        self._folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("Waiting for another process that downloads %s", self.url)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _blob(self, file: StoredFile) -> Path:
        return self._folder / "blobs" / file.key

    def _link(self, link: Path, blob: Path) -> None:
        if link.exists():
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # a link to a blob that was deleted
        link.symlink_to(os.path.relpath(blob, link.parent))

    def _state(self) -> str:
        return hashlib.sha256(json.dumps(self._listing()).encode()).hexdigest()[:32]

    def _listing(self) -> dict[str, Any]:
        return {"url": self.url, "files": [asdict(file) for file in self.files.values()]}

    def _read_saved(self) -> dict[str, Any] | None:
        try:
            saved: dict[str, Any] = json.loads(self._saved.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return saved

    def _read_listing(self) -> dict[str, StoredFile]:
        saved = self._read_saved()
        if saved is None:
            raise self._offline_error()
        return {entry["name"]: StoredFile(**entry) for entry in saved["files"]}

    def _offline_error(self) -> ConfigError:
        return ConfigError(
            f"{self.url!r} is not in the local cache, and HF_HUB_OFFLINE is set: unset it, or download the "
            "files first"
        )


class _Part:
    """An unfinished download: a file with the data at their offsets, and a list of the finished chunks."""

    def __init__(self, blob: Path, file: StoredFile) -> None:
        self.file, self._blob = file, blob
        self._data, self._chunks = blob.with_suffix(".part"), blob.with_suffix(".chunks")
        if not self._data.exists():
            self.discard()
            with self._data.open("wb") as data:
                data.truncate(file.num_bytes)
        self._done = self._read_done()

    def missing(self) -> list[tuple[int, int]]:
        """Return the start and end of the chunks that are still to be read."""
        size = self.file.num_bytes
        chunks = ((start, min(start + CHUNK_BYTES, size)) for start in range(0, size, CHUNK_BYTES))
        return [chunk for chunk in chunks if chunk not in self._done]

    @property
    def num_missing_bytes(self) -> int:
        return sum(end - start for start, end in self.missing())

    def write(self, start: int, data: bytes) -> None:
        """Store a chunk. The chunk counts as finished only when its data are on the disk."""
        with self._data.open("r+b") as file:
            file.seek(start)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with self._chunks.open("ab", buffering=0) as chunks:
            chunks.write(f"{start} {start + len(data)}\n".encode())  # one write: lines of threads do not mix

    def finish(self) -> None:
        self._data.replace(self._blob)
        self._chunks.unlink(missing_ok=True)

    def discard(self) -> None:
        self._data.unlink(missing_ok=True)
        self._chunks.unlink(missing_ok=True)

    def _read_done(self) -> set[tuple[int, int]]:
        text = self._chunks.read_text() if self._chunks.exists() else ""
        lines = text.split("\n")[:-1]  # a killed process may leave a line without its end
        return {(int(start), int(end)) for start, end in map(str.split, lines)}


def _is_path(name: str) -> bool:
    """Whether the key of an object is a path below its folder. Stores allow any text as a key: `a//b`,
    `../a`, `a/`."""
    return "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _stored_file(name: str, info: Mapping[str, Any]) -> StoredFile:
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "")
    return StoredFile(name, int(info.get("size") or 0), version)


def _folder_name(url: str) -> str:
    """Return a readable and unique folder name for a URL, such as `s3--bucket--model-0a1b2c3d4e5f`."""
    readable = re.sub(r"[^\w.-]", "_", url.replace("://", "--").replace("/", "--"))
    return f"{readable[:120]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def _open_url(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    scheme = url.partition("://")[0].lower()
    import fsspec

    try:
        fs, base = fsspec.core.url_to_fs(url, **_options(scheme))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f"pip install 'quire[{extra}]'" if extra else "install the fsspec driver of its scheme"
        raise ConfigError(f"{url!r:.200} cannot be read: {error}: {remedy}") from None
    except Exception as error:  # each fsspec driver has its own exceptions
        if isinstance(error, ValueError) and scheme not in fsspec.available_protocols():
            raise ConfigError(f"{url!r:.200} cannot be read: {error}; known: s3://, gs://") from None
        raise _store_error(url, error) from None
    return fs, str(base).rstrip("/")


def _options(scheme: str) -> dict[str, Any]:
    """Return the options of the fsspec driver. Botocore reads all AWS variables except AWS_REGION, which is
    therefore passed as an option."""
    if EXTRAS.get(scheme) != "s3":
        return {}
    options: dict[str, Any] = {"config_kwargs": {"max_pool_connections": NUM_READERS}}
    region = os.environ.get("AWS_REGION")
    if region and not os.environ.get("AWS_DEFAULT_REGION"):
        options["client_kwargs"] = {"region_name": region}
    return options


def _store_error(url: str, error: Exception) -> ConfigError:
    """Return the error of a store as one sentence with a remedy."""
    kind, message = type(error).__name__, " ".join(str(error).split())[:_MAX_ERROR_CHARS]
    credentials = _CREDENTIALS.get(EXTRAS.get(url.partition("://")[0].lower(), ""), "check the credentials")
    if kind in _CREDENTIAL_ERRORS:
        return ConfigError(f"{url!r:.200} cannot be read without credentials ({kind}): {credentials}")
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{url!r:.200} does not exist ({message}): check the bucket and the path")
    if isinstance(error, PermissionError):
        return ConfigError(
            f"{url!r:.200} may not be read ({message}): the credentials need the rights to list and to read "
            f"it; {credentials}"
        )
    return ConfigError(
        f"{url!r:.200} cannot be read: {kind}: {message}; to use the copy in the local cache, set "
        "HF_HUB_OFFLINE=1"
    )
