"""DiskTier: KV cache blocks in files of a directory.

A file contains digests of the model and of the block, and is renamed to its final name when it is complete. A
file of another model, or one that a crash or the disk has damaged, is therefore never read as a block."""

import contextlib
import errno
import fcntl
import hashlib
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.config.kv_identity import cache_identity, weight_files
from quire.config.parallel import Rank
from quire.data.kv_tiers import LoadDone
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.worker.other_models import LOCK_FILE, OtherModels, block_files

log = get_logger(__name__)

_MAGIC = b"quirekv1"
_DIGEST_BYTES = 32
HEADER_BYTES = len(_MAGIC) + 2 * _DIGEST_BYTES
_ENDING = ".kv"
_UNFINISHED = ".tmp"
_KINDS = ("", "_states")
"""Kinds of folders, which are the last part of their names: for KV blocks, and for checkpoints of SSM
states."""
_SUFFIX = re.compile(r"_r(\d+)(\D*)")
"""Pattern of the part of a folder's name after the model's digest: the rank and the kind."""
_NUM_READERS = 4
_MAX_WAITING_BYTES = 1 << 30
"""Maximum number of bytes that wait to be written; blocks beyond it are not written."""
_LOCK_S = 10.0
"""Maximum seconds to wait until a previous process releases the directory."""
_CLOSE_S = 30.0
"""Maximum seconds to wait at the end for pending writes."""
Bytes = NDArray[np.uint8]


class ContentsLater(Protocol):
    """Contents of blocks that may still be on their way to host memory."""

    def wait(self) -> Bytes:
        """Wait for the contents and return them."""


def _digest(key: bytes, data: Bytes) -> bytes:
    hashed = hashlib.blake2b(key, digest_size=_DIGEST_BYTES)
    hashed.update(data.data)
    return hashed.digest()


class DiskTier:
    """Files of KV cache blocks, one per block and named by its key. A separate thread writes them."""

    def __init__(
        self,
        folder: Path,
        *,
        model: bytes,
        block_bytes: int,
        most_bytes: int = 0,
        takes: Callable[[str], bool] | None = None,
    ) -> None:
        """Open or create the folder of a model. `model` is the digest of all properties that the contents of
        a block depend on besides its key. `most_bytes` limits the files of this tier together with those of
        other models whose folder suffix `takes` accepts; the latter are deleted to make room."""
        assert len(model) == _DIGEST_BYTES
        self.folder, self.model, self.block_bytes = folder, model, block_bytes
        self.is_off = False
        """Whether an error of the disk has switched the tier off: nothing is written any more."""
        self._lock = threading.Lock()
        self._num_waiting_bytes = 0
        self._read_s = self._write_s = 0.0
        self._num_written_bytes = 0
        self._lost_writes: list[bytes] = []
        """Keys of blocks that could not be written, since the last `take_report`."""
        self._unwritten: dict[bytes, tuple[ContentsLater, int]] = {}
        """Contents that wait to be written, and the index of the block in them, by key."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._folder_lock = self._open_folder()
        self._num_files = 0
        self._most_bytes, self._others = most_bytes, None
        if takes is not None:
            self._others = OtherModels(folder, folder_digest(model), takes, _ENDING)
        self._readers = ThreadPoolExecutor(_NUM_READERS, "quire-kv-read")
        self._writer = threading.Thread(target=self._run, name="quire-kv-write", daemon=True)
        self._writer.start()

    def _open_folder(self) -> int:
        """Create the folder so that only its user can read it, and lock it; return the descriptor of the lock
        file."""
        try:
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if self.folder.is_symlink():
                raise OSError(errno.ELOOP, "it is a symbolic link")
            self.folder.chmod(0o700)
            lock = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"kv_offloading_dir: {self.folder} cannot be used: {error.strerror}; give a directory that"
                " this user can read and write"
            ) from error
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except OSError:
                if time.monotonic() > until:
                    os.close(lock)
                    raise ConfigError(
                        f"kv_offloading_dir: {self.folder} is used by another engine: give each its own"
                        " directory"
                    ) from None
                time.sleep(0.1)

    def keys(self) -> list[bytes]:
        """Return the keys of all complete files, the least recently used first. Unfinished files are deleted,
        and so are files with a block's ending that are not named by a key."""
        times: dict[bytes, float] = {}
        for entry in block_files(self.folder):
            path = Path(entry.path)
            if path.suffix not in (_ENDING, _UNFINISHED):
                continue
            with contextlib.suppress(OSError):
                key, status = _key_of(path), entry.stat(follow_symlinks=False)
                if key is None or not stat.S_ISREG(status.st_mode) or status.st_size != self._file_bytes:
                    path.unlink()
                else:
                    times[key] = status.st_mtime
        self._num_files = len(times)
        self._jobs.put(self._make_room)
        return sorted(times, key=times.__getitem__)

    @property
    def _file_bytes(self) -> int:
        return HEADER_BYTES + self.block_bytes

    def _make_room(self, count: int = 0) -> None:
        """Delete files of other models, so that `count` more files fit into the directory."""
        if self._others is not None:
            self._others.shrink(self._most_bytes - (self._num_files + count) * self._file_bytes)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / (name + _ENDING)

    # ---- writing

    def admit(self, keys: Sequence[bytes]) -> int:
        """Return how many of these blocks may be queued, counted from the first. The other blocks are
        recorded as lost writes."""
        with self._lock:
            left = 0 if self.is_off else _MAX_WAITING_BYTES - self._num_waiting_bytes
            count = min(left // max(self.block_bytes, 1), len(keys))
            self._lost_writes += keys[count:]
        return count

    def write(self, keys: Sequence[bytes], contents: ContentsLater) -> None:
        """Queue the blocks that `admit` has accepted, to be written in the background."""
        num_bytes = len(keys) * self.block_bytes
        with self._lock:
            self._num_waiting_bytes += num_bytes
            self._unwritten |= {key: (contents, at) for at, key in enumerate(keys)}
        self._jobs.put(lambda: self._write_all(keys, contents, num_bytes))

    def _write_all(self, keys: Sequence[bytes], contents: ContentsLater, num_bytes: int) -> None:
        num_written = 0
        try:
            data = contents.wait()
            began = time.monotonic()
            self._make_room(len(keys))
            for key, block in zip(keys, data, strict=True):
                if self.is_off:
                    break
                self._write(key, block)
                num_written += 1
            with self._lock:
                self._write_s += time.monotonic() - began
                self._num_written_bytes += num_bytes
        except OSError as error:
            self.is_off = True
            log.warning(
                "The KV cache on disk is off: %s cannot be written: %s. Blocks on disk are still read",
                self.folder,
                error.strerror or error,
            )
        finally:
            with self._lock:
                self._num_waiting_bytes -= num_bytes
                self._lost_writes += keys[num_written:]
                for key in keys:
                    if key in self._unwritten and self._unwritten[key][0] is contents:
                        del self._unwritten[key]

    def _write(self, key: bytes, block: Bytes) -> None:
        path = self._path(key)
        unfinished = path.with_suffix(_UNFINISHED)
        self._num_files += not path.exists()
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                _write_fully(file.fileno(), _MAGIC + self.model + _digest(key, block))
                _write_fully(file.fileno(), block.data)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def delete(self, keys: Sequence[bytes]) -> None:
        """Queue the deletion of the files with these keys, after the blocks that are queued for writing."""

        def remove() -> None:
            for key in keys:
                with contextlib.suppress(OSError):
                    self._path(key).unlink()
                    self._num_files -= 1

        self._jobs.put(remove)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    # ---- reading

    def read(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Return the contents of blocks; None for those that are missing or damaged."""
        began = time.monotonic()
        blocks = list(self._readers.map(self._read, keys))
        with self._lock:
            self._read_s += time.monotonic() - began
        return blocks

    def take_report(self, done: LoadDone) -> None:
        """Add to `done` the times and bytes of the reads and writes since the last call, and the keys of lost
        writes; set its `is_off` if the tier is switched off."""
        with self._lock:
            done.read_s += self._read_s
            done.write_s += self._write_s
            done.written_bytes += self._num_written_bytes
            self._read_s, self._write_s, self._num_written_bytes = 0.0, 0.0, 0
            done.lost_writes += self._lost_writes
            self._lost_writes = []
        done.is_off = done.is_off or self.is_off

    def flush(self) -> None:
        """Wait until the queued blocks are written, at most `_CLOSE_S` seconds."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait(_CLOSE_S)

    def _read(self, key: bytes) -> Bytes | None:
        with self._lock:
            unwritten = self._unwritten.get(key)
        if unwritten is not None:
            contents, at = unwritten
            block: Bytes = contents.wait()[at].copy()
            return block
        path = self._path(key)
        try:
            data = np.fromfile(path, np.uint8)
        except OSError:
            return None
        head, block = data[:HEADER_BYTES].tobytes(), data[HEADER_BYTES:]
        expected = _MAGIC + self.model + _digest(key, block)
        if len(block) != self.block_bytes or head != expected:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return block

    def close(self) -> None:
        """Write the queued blocks, and release the folder."""
        self._jobs.put(None)
        self._writer.join(_CLOSE_S)
        self._readers.shutdown()
        os.close(self._folder_lock)


def _key_of(path: Path) -> bytes | None:
    """Return the key that a file is named by; None for other files."""
    if path.suffix != _ENDING:
        return None
    try:
        return bytes.fromhex(path.stem)
    except ValueError:
        return None


def _write_fully(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(descriptor, view) :]


# ---- the folder of a model


def open_disk_tiers(
    config: EngineConfig, rank: Rank, sizes: Sequence[int], counts: Sequence[int]
) -> list[DiskTier | None]:
    """Open the folders of this model and rank in kv_offloading_dir: for KV blocks, and for checkpoints of SSM
    states if there are any. `sizes` are the bytes of an entry of each kind, `counts` the most entries. The
    list has None for each if the setting is missing."""
    if config.cache.kv_offloading_dir is None:
        return [None for _ in sizes]
    model, index = model_digest(config), rank.index(config.parallel)
    parallel = config.parallel
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.data_parallel_size
    name = re.sub(r"[^\w.-]+", "_", config.model.model)[-100:].strip("_.") or "model"
    folder = Path(config.cache.kv_offloading_dir).expanduser() / f"{name}_{folder_digest(model)}"
    endings = [ending for ending, count in zip(_KINDS, counts, strict=False) if count]

    def owner_of(suffix: str) -> str:
        """Return the suffix of this engine's tier that may delete files of another model with the folder
        suffix `suffix`, to make room."""
        at, ending = _SUFFIX.fullmatch(suffix).groups()  # type: ignore[union-attr]
        return f"_r{at if int(at) < num_ranks else 0}{ending if ending in endings else endings[0]}"

    tiers = list[DiskTier | None]()
    for ending, size, count in zip(_KINDS, sizes, counts, strict=False):
        suffix, most_bytes = f"_r{index}{ending}", count * (HEADER_BYTES + size)
        path = folder.with_name(folder.name + suffix)
        takes = partial(lambda own, other: owner_of(other) == own, suffix)
        tiers.append(DiskTier(path, model=model, block_bytes=size, most_bytes=most_bytes, takes=takes))
    return tiers


def folder_digest(model: bytes) -> str:
    """Return the part of a model's digest that is in the names of its folders."""
    return model.hex()[:12]


def model_digest(config: EngineConfig) -> bytes:
    """Return the digest of everything that the contents of a block depend on besides tokens, adapter, media
    and salt: the model and its weights, dtypes and the layout of the cache. Weights are identified by the
    names, sizes and times of their files, so a new file counts as another model."""
    draft = config.draft
    parts: list[object] = [
        *cache_identity(config).values(),
        config.model.batch_invariant,  # in this mode, contents do not depend on other requests
        _files(config.checkpoint.path),
        None if draft is None else _files(draft.checkpoint.path),
    ]
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).digest()


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Return the name, size and time of each weight file of a model."""
    stats = [(file.name, file.stat()) for file in weight_files(path)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
