"""The listening socket of a port or of a Unix socket path."""

import contextlib
import socket
import stat
from pathlib import Path
from typing import Any

from quire.config.server_sections import HttpSection
from quire.errors import ConfigError

_BACKLOG = 2048


def bind(http: HttpSection) -> socket.socket:
    """Return the listening socket. Call this before a model is loaded, so that a port in use is reported at
    once."""
    if http.uds:
        return _bind_uds(Path(http.uds))
    host = http.host or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listen(listener, (host, http.port), f"{host}:{http.port}", "choose another --host or --port")


def check_is_free(http: HttpSection) -> None:
    """Raise a ConfigError if the server's port or socket path is in use; call this before a model is loaded.
    No socket file is created: its existence would make clients believe that a server is running."""
    if http.headless:
        return
    if not http.uds:
        bind(http).close()
    elif _is_in_use(Path(http.uds)):
        raise ConfigError(f"cannot listen on {http.uds}: a server uses it; choose another --uds")


def _bind_uds(path: Path) -> socket.socket:
    with contextlib.suppress(OSError):  # `_listen` then reports that the path cannot be used
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _is_in_use(path):
            path.unlink()
    return _listen(
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path), str(path), "choose another --uds"
    )


def _listen(listener: socket.socket, address: Any, shown: str, remedy: str) -> socket.socket:
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {shown}: {reason}; {remedy}") from None
    return listener


def _is_in_use(path: Path) -> bool:
    """Whether a server listens on the socket file; otherwise a killed server left the file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
