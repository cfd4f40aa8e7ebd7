"""Connections between engines that exchange KV cache entries of prefixes: addresses, known engines,
memory."""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Self

from quire.config.kv_transfer import TransferSettings
from quire.data.kv_transfer import DATA_START, NONCE_BYTES, RemotePrefix, TargetMemory

FOLDER = "kv_engines"
_DESCRIPTOR = re.compile(r"/proc/\d{1,10}/fd/\d{1,10}")
_LOOPBACK = "127.0.0.1"


def zmq_address(host: str, port: int | str) -> tuple[str, bool]:
    """Return the ZMQ address (tcp://...) of a host and port, and whether it is IPv6; raise OSError for an
    unknown host."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, *_, (numbers, *_) = min(addresses, key=lambda entry: entry[0] == socket.AF_INET6)
    is_v6 = family == socket.AF_INET6
    return f"tcp://[{numbers}]:{port}" if is_v6 else f"tcp://{numbers}:{port}", is_v6


def token_host(settings: TransferSettings, side_channel_host: str) -> str:
    """Return the host by which `cluster_token` decides on a token: the first configured host that is another
    machine, or loopback if all are this machine."""
    hosts = [side_channel_host] if settings.produces else []
    hosts += [host for host, _ in settings.peers] if settings.consumes else []
    local = ("localhost", "::1")
    return next((host for host in hosts if host not in local and not host.startswith("127.")), _LOOPBACK)


# ---- engines of this user on this machine


class KnownEngine:
    """The file by which engines of the same user on this machine find this engine. The file is locked while
    the engine runs; files without a lock are deleted."""

    def __init__(self, root: Path, engine_id: str, host: str, port: int) -> None:
        folder = root / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.glob("[!.]*"):
            with contextlib.suppress(OSError), path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        self._path = folder / engine_id
        unlocked = folder / f".{engine_id}"  # other engines ignore names with a leading dot
        self._file = unlocked.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(f"{host} {port}")
        self._file.flush()
        unlocked.replace(self._path)

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def is_peer(settings: TransferSettings, root: Path, engine_id: str, prefix: RemotePrefix) -> bool:
    """Whether a prefix may be loaded from the engine at its address: one among the peers of the settings,
    or an engine of this user on this machine."""
    if any(host == prefix.host and port in (None, prefix.port) for host, port in settings.peers):
        return True
    if not re.fullmatch(r"[\w.-]{1,200}", engine_id) or engine_id.startswith("."):
        return False
    with contextlib.suppress(OSError):
        return (root / FOLDER / engine_id).read_text() == f"{prefix.host} {prefix.port}"
    return False


# ---- shared memory


class TransferMemory:
    """Memory to which another process on this machine may write KV cache entries. It has no name: the other
    process opens it through /proc of this process, and checks the random bytes at its start."""

    def __init__(self, num_bytes: int) -> None:
        fd = os.memfd_create("quire-kv")
        try:
            os.ftruncate(fd, DATA_START + num_bytes)
            self._map = mmap.mmap(fd, DATA_START + num_bytes)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        nonce = self._map[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
        self.target = TargetMemory(nonce, path=f"/proc/{os.getpid()}/fd/{fd}")
        self.data = memoryview(self._map)[DATA_START:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)  # the mapping ends with the last reference to its data


def open_memory(path: str, nonce: bytes) -> memoryview | None:
    """Return the memory of another process, opened from `path`, to write KV cache entries to; None if the
    path cannot be opened or the random bytes at its start are not `nonce`."""
    if not _DESCRIPTOR.fullmatch(path) or len(nonce) != NONCE_BYTES:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        memory = mmap.mmap(fd, 0)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    if len(memory) < DATA_START or not secrets.compare_digest(memory[:NONCE_BYTES], nonce):
        return None
    return memoryview(memory)[DATA_START:]
