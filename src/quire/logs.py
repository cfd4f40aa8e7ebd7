"""Loggers: one format, a process prefix, and warnings that are logged once."""

import functools
import logging
import os
import stat
import sys
from collections.abc import Callable
from typing import TextIO

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_prefix = ""
_MAX_WARNED = 1024
"""Number of messages that `warn_once` remembers; limited, because some contain text from clients."""


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _prefix + super().format(record)


class LogStream:
    """Writes lines to a text stream. If this is a pipe or a socket, lines are dropped while it is full, so
    that a server whose log nothing reads does not stop."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._opened: tuple[int, int] | None = None
        """Device and inode of the pipe or socket to which `_send` writes."""
        self._send: Callable[[bytes], int] | None = None
        """Writes without waiting; None if the stream is no pipe and no socket, or cannot be reopened."""
        self._num_dropped = 0

    def write(self, line: str) -> None:
        self._reopen()
        if self._send is None:
            self.stream.write(line)
            return
        if self._num_dropped:
            line = f"\n{self._num_dropped} log lines were dropped: the pipe was full\n{line}"
        data = line.encode(errors="backslashreplace")
        try:
            self._num_dropped = int(self._send(data) < len(data))
        except (BlockingIOError, BrokenPipeError):
            self._num_dropped += 1

    def flush(self) -> None:
        self.stream.flush()

    def _reopen(self) -> None:
        """Open the pipe or socket of the stream a second time, unless it is open. The file descriptor of the
        stream itself stays blocking, because other processes may share it."""
        try:
            fd = self.stream.fileno()
            status = os.fstat(fd)
        except (OSError, ValueError):  # not a file, or closed
            return
        if (status.st_dev, status.st_ino) == self._opened:
            return
        self._opened, self._send = (status.st_dev, status.st_ino), None
        try:
            if stat.S_ISFIFO(status.st_mode):
                self._send = functools.partial(os.write, _open_pipe(fd))
            elif stat.S_ISSOCK(status.st_mode):
                import socket

                connection = socket.socket(fileno=os.dup(fd))
                self._send = lambda data: connection.send(data, socket.MSG_DONTWAIT)
        except OSError:  # a pipe of another user, or one that nothing has open for reading
            pass


def _open_pipe(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class _Handler(logging.StreamHandler[LogStream]):
    """Writes lines to a stream. Progress bars of this process are cleared before a line and drawn again after
    it, so that no line begins behind a bar."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(LogStream(stream))

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bars is None or not getattr(bars, "_instances", ()):
            super().emit(record)
            return
        with bars.external_write_mode(file=self.stream.stream):
            super().emit(record)


def name_process(role: str) -> None:
    """Add the role and pid of this process as a prefix to its log lines."""
    global _prefix
    _prefix = f"({role} pid={os.getpid()}) "


@functools.cache
def _root() -> logging.Logger:
    root = logging.getLogger("quire")
    if not root.handlers:
        handler = _Handler(sys.stderr)
        handler.setFormatter(_Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(os.environ.get("QUIRE_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "INFO")).upper())
    return root


def get_logger(name: str) -> logging.Logger:
    _root()
    return logging.getLogger(name)


def printable(text: str, max_chars: int = 256) -> str:
    """Return text of a client as one printable line, truncated to `max_chars`."""
    head = text[:max_chars]
    shown = head if head.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in head)
    return shown if len(text) <= max_chars else shown + "..."


class FirstWarning:
    """Logs its first message as a warning and later ones at debug level, so that a peer that repeats an error
    does not fill the log."""

    def __init__(self, logger: logging.Logger, prefix: str) -> None:
        self._logger, self._prefix = logger, prefix
        self._level = logging.WARNING

    def __call__(self, message: str) -> None:
        self._logger.log(self._level, "%s: %s", self._prefix, message, stacklevel=2)
        self._level = logging.DEBUG


@functools.lru_cache(_MAX_WARNED)
def warn_once(logger: logging.Logger, message: str) -> None:
    logger.warning(message, stacklevel=2)
