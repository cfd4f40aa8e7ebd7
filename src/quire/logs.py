"""Loggers: one format, a process prefix, and warnings that are logged once."""

import functools
import logging
import os
import sys
from typing import TextIO

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_prefix = ""
_MAX_WARNED = 1024
"""Number of messages that `warn_once` remembers; limited, because some contain text from clients."""


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _prefix + super().format(record)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream. Progress bars of this process are cleared before a line and drawn again after
    it, so that no line begins behind a bar."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bars is None or not getattr(bars, "_instances", ()):
            super().emit(record)
            return
        with bars.external_write_mode(file=self.stream):
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
