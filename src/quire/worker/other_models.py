"""OtherModels: files of other models in kv_offloading_dir, which make way for those of this engine."""

import contextlib
import fcntl
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE = "lock"
"""File in the folder of a model that is locked while an engine uses the folder."""
_PART = re.compile(r"[0-9a-f]{2}")
_FOLDER = re.compile(r".+_([0-9a-f]{12})(_r\d+(?:_states)?)")


def block_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the directory entries of all block files of a model: they lie in subfolders that are named by the
    first byte of a key. Symbolic links are not followed."""
    with contextlib.suppress(OSError), os.scandir(folder) as parts:
        for part in parts:
            if _PART.fullmatch(part.name) and part.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError), os.scandir(part.path) as entries:
                    yield from entries


@dataclass(slots=True)
class _Folder:
    """The folder of another model, with its files."""

    path: Path
    last_use: float
    files: deque[tuple[str, int]]
    """Path and bytes of each file, the least recently used first."""


class OtherModels:
    """Files of other models beside the folder of an engine. The least recently used ones are deleted as the
    engine's own files grow."""

    def __init__(self, folder: Path, model: str, takes: Callable[[str], bool], ending: str) -> None:
        """Find the files of other models in the folders beside `folder`. These are folders whose names have
        another digest than `model` and a suffix that `takes` accepts, and that no engine uses. `ending` is
        the ending of the files."""
        self.num_bytes = 0
        folders: list[_Folder] = []
        with contextlib.suppress(OSError), os.scandir(folder.parent) as entries:
            for entry in entries:
                name = _FOLDER.fullmatch(entry.name)
                is_other = name is not None and name[1] != model and takes(name[2])
                if is_other and entry.is_dir(follow_symlinks=False):
                    with _locked(Path(entry.path)) as is_free:
                        folders += [self._read(Path(entry.path), ending)] if is_free else []
        self._folders = deque(sorted(folders, key=lambda folder: folder.last_use))

    def _read(self, path: Path, ending: str) -> _Folder:
        by_age: list[tuple[float, str, int]] = []
        for entry in block_files(path):
            with contextlib.suppress(OSError):
                if entry.name.endswith(ending) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    by_age.append((status.st_mtime, entry.path, status.st_size))
        by_age.sort()
        self.num_bytes += sum(size for *_, size in by_age)
        return _Folder(
            path, by_age[-1][0] if by_age else 0.0, deque((name, size) for _, name, size in by_age)
        )

    def shrink(self, most_bytes: int) -> None:
        """Delete files until at most `most_bytes` bytes of them are left, first those of the model that was
        used least recently. A folder that an engine has begun to use is left alone and no longer counted."""
        while self.num_bytes > most_bytes and self._folders:
            folder = self._folders[0]
            with _locked(folder.path) as is_free:
                while folder.files and (not is_free or self.num_bytes > most_bytes):
                    path, size = folder.files.popleft()
                    self.num_bytes -= size
                    if is_free:
                        with contextlib.suppress(OSError):
                            os.unlink(path)
            if not folder.files:
                self._folders.popleft()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock the folder of a model within the context. The value is False if an engine uses the folder, or
    if it was not made by an engine."""
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)
