"""Journal of finished answers on disk, from which a killed run resumes."""

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.errors import ConfigError

FSYNC_EVERY_S = 1.0


class _Entry(msgspec.Struct):
    custom_id: str


_read = msgspec.json.Decoder(_Entry).decode


class Journal:
    """File of the finished answers of a batch, which is kept until the output is written. Only one process
    may have it open: in a second one, the constructor raises a ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished: dict[str, tuple[int, int]] = {}
        """Offset and size in bytes of the answer line of each custom_id."""
        self._file = self._open()
        self._end = self._load()
        self._synced_at = time.monotonic()

    def add(self, custom_id: str, line: bytes) -> None:
        """Append the answer `line`. It survives a process crash at once, a machine crash after an fsync."""
        self._file.seek(self._end)
        self._file.write(line)
        self._file.flush()
        self.finished[custom_id] = (self._end, len(line))
        self._end += len(line)
        if time.monotonic() - self._synced_at > FSYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced_at = time.monotonic()

    def read(self, custom_id: str) -> bytes:
        offset, num_bytes = self.finished[custom_id]
        self._file.seek(offset)
        return self._file.read(num_bytes)

    def check(self, known: Iterable[str]) -> None:
        """Raise a ConfigError if the journal has an answer to a custom_id that is not in `known`."""
        if foreign := next(iter(self.finished.keys() - set(known)), None):
            raise ConfigError(
                f"{self.path} contains an answer to {foreign!r}, which is not in this batch: "
                "delete it, or choose another output file"
            )

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def remove(self) -> None:
        self.path.unlink()
        self._file.close()

    def _open(self) -> BinaryIO:
        try:
            file = open(self.path, "a+b")  # noqa: SIM115  (held until close())
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(f"{self.path} is in use by another run; wait for it or stop it") from None
        return file

    def _load(self) -> int:
        """Read the finished answers, truncate the file at the first damaged line, and return its size in
        bytes."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            try:
                entry = _read(line) if line.endswith(b"\n") else None
            except (msgspec.DecodeError, UnicodeDecodeError):
                entry = None
            if entry is None:
                break
            self.finished[entry.custom_id] = (end, len(line))
            end += len(line)
        self._file.truncate(end)
        return end
