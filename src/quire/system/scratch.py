"""A folder for the sockets and shared files of one process and its children."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Self

PREFIX = "quire-"
LOCK = "lock"


class Scratch:
    """A temporary folder that is removed with its owner, or by the next owner after a kill.

    The owner holds a lock on a file in the folder. The system releases the lock when the owner ends.
    """

    def __init__(self, root: Path | None = None) -> None:
        sweep(root or Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        # Renamed once it is locked: the owner of a folder with an unlocked lock file is always dead.
        unnamed = self.path / "new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)
        # systemd-tmpfiles, which deletes old files in /tmp, skips folders that are locked.
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._folder, fcntl.LOCK_EX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            os.close(self._folder)
            self._lock = -1


def sweep(root: Path) -> None:
    """Remove the folders of dead owners. Those of running owners, and of other users, stay."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
