"""CPU time of processes during a run: who spent how much of a core."""

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
    """Reads the clocks of processes and their children now, and again when asked."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._before = {each.pid: each for each in _usages(pids)}

    def spent(self) -> list[CpuUsage]:
        """What each process, also those that came since, has used since the beginning."""
        found = []
        for now in _usages(list(self._before)):
            then = self._before.get(now.pid, CpuUsage(now.pid, now.role, 0.0, 0.0))
            found.append(CpuUsage(now.pid, now.role, now.user_s - then.user_s, now.system_s - then.system_s))
        return found


def listening_pids(port: int) -> list[int]:
    """Processes of this machine, as far as we may see them, that listen on a TCP port. Of several that share
    a socket only the eldest: the others are among its children."""
    try:
        sockets = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return []
    pids = {each.pid for each in sockets if _is_listening(each, port) and each.pid is not None}
    return sorted({_eldest(psutil.Process(pid), port).pid for pid in pids})


def _eldest(process: psutil.Process, port: int) -> psutil.Process:
    try:
        parent = process.parent()
        shares = parent is not None and any(
            _is_listening(each, port) for each in parent.net_connections(kind="tcp")
        )
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return process
    return _eldest(parent, port) if parent is not None and shares else process


def _is_listening(socket: Any, port: int) -> bool:
    return socket.status == psutil.CONN_LISTEN and bool(socket.laddr) and socket.laddr.port == port


def report(usages: Sequence[CpuUsage], *, seconds: float, num_tokens: int) -> list[str]:
    """A table of who spent how much during a run of `seconds` that streamed `num_tokens`."""
    shown = [
        f"{'process':<28} {'pid':>8} {'user s':>9} {'system s':>9} {'of one core':>12} {'us/token':>9}",
    ]
    for each in usages:
        spent = each.user_s + each.system_s
        shown.append(
            f"{each.role:<28.28} {each.pid:>8} {each.user_s:>9.2f} {each.system_s:>9.2f} "
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
    """The name a process gave itself, else the end of its command line."""
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
