"""CPU time of processes during a run."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU time of one process."""

    pid: int
    role: str
    user_s: float
    system_s: float


class CpuWatch:
    """Reads the CPU times of processes and their children at the start, and again on request."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._before = {usage.pid: usage for usage in _usages(pids)}

    def spent(self) -> list[CpuUsage]:
        """Return the CPU time of each process since this object was created, including processes that started
        later."""
        spent = []
        for now in _usages(list(self._before)):
            before = self._before.get(now.pid, CpuUsage(now.pid, now.role, 0.0, 0.0))
            spent.append(
                CpuUsage(now.pid, now.role, now.user_s - before.user_s, now.system_s - before.system_s)
            )
        return spent


def listening_pids(port: int) -> list[int]:
    """Return the visible processes that listen on a TCP port. If several share a socket, only their common
    ancestor is returned, since the others are its children."""
    try:
        sockets = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return []
    pids = {sock.pid for sock in sockets if _is_listening(sock, port) and sock.pid is not None}
    return sorted({_oldest_listener(psutil.Process(pid), port).pid for pid in pids})


def _oldest_listener(process: psutil.Process, port: int) -> psutil.Process:
    try:
        parent = process.parent()
        shares = parent is not None and any(
            _is_listening(sock, port) for sock in parent.net_connections(kind="tcp")
        )
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return process
    return _oldest_listener(parent, port) if parent is not None and shares else process


def _is_listening(socket: Any, port: int) -> bool:
    return socket.status == psutil.CONN_LISTEN and bool(socket.laddr) and socket.laddr.port == port


def report(usages: Sequence[CpuUsage], *, seconds: float, num_tokens: int) -> list[str]:
    """Return the lines of a table of the CPU time of processes, in a run of `seconds` that streamed
    `num_tokens`."""
    shown = [f"{'process':<28} {'pid':>8} {'user s':>9} {'system s':>9} {'of one core':>12} {'us/token':>9}"]
    for usage in usages:
        spent = usage.user_s + usage.system_s
        shown.append(
            f"{usage.role:<28.28} {usage.pid:>8} {usage.user_s:>9.2f} {usage.system_s:>9.2f} "
            f"{spent / seconds:>12.1%} {spent / max(1, num_tokens) * 1e6:>9.1f}"
        )
    return shown


def _usages(pids: Iterable[int]) -> Iterator[CpuUsage]:
    seen: set[int] = set()
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            if process.pid in seen:
                continue
            seen.add(process.pid)
            try:
                times = process.cpu_times()
                yield CpuUsage(process.pid, _role(process), times.user, times.system)
            except psutil.NoSuchProcess:
                continue


def _role(process: psutil.Process) -> str:
    """Return the title of a process, or the end of its command line."""
    if process.pid == os.getpid():
        return "client (this process)"
    name = process.name()
    if not name.startswith("python"):
        return name
    words = [word.rpartition("/")[2] for word in process.cmdline()]
    return " ".join(words[:4]) or name


def check_pid(pid: int) -> int:
    if not psutil.pid_exists(pid):
        raise ConfigError(f"--server-pid {pid}: there is no such process")
    return pid
