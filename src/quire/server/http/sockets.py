"""The listening socket: a port or a path."""

import socket
import stat
from pathlib import Path

from quire.errors import ConfigError
from quire.server.settings import HttpSection

_BACKLOG = 2048


def bind(http: HttpSection) -> socket.socket:
    """The listening socket; taken before anything slow starts, so that a taken port is known at once."""
    if http.uds:
        return _bind_uds(Path(http.uds))
    host = http.host or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, http.port))
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"cannot listen on {host}:{http.port}: {error.strerror or error}; choose another --host or --port"
        ) from None
    return found


def _bind_uds(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        found.bind(str(path))
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}; choose another --uds"
        ) from None
    return found


def _answers(path: Path) -> bool:
    """Whether somebody listens there, or it is what a killed server left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
