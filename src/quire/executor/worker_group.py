"""Worker groups: the interface to the ranks of an engine, and ranks of this machine as child processes."""

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Protocol

from quire.executor.messages import FromRank, RankEnded, decode_from_rank
from quire.executor.worker_process import RankAddress
from quire.logs import get_logger
from quire.system import shm

log = get_logger(__name__)

MessageQueue = queue.SimpleQueue[tuple[int, FromRank]]
"""Messages of ranks, each with its index in the group, in order of arrival."""
LOOK_S = 0.5
"""Seconds between two checks for ended rank processes."""
END_S = 2.0
"""Seconds in which ranks may end by themselves before they are killed."""
_ENTRY = "from quire.executor.worker_process import main; main()"


class WorkerGroup(Protocol):
    """The ranks of an engine, as the executor reaches them."""

    messages: MessageQueue

    @property
    def names(self) -> list[str]: ...

    end_reason: str | None
    """Reason of the end, for ranks on other machines: empty for a normal end, None if they may reconnect."""

    def send_order(self, order: bytes) -> None:
        """Send an encoded `Order` to all ranks."""

    def send(self, plan: bytes, timeout_s: float) -> None:
        """Send an encoded step plan to all ranks."""

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next encoded step outcome; None if none arrives within `timeout_s` seconds."""

    def end(self) -> None:
        """End all ranks and free all resources."""


@dataclass
class _Member:
    """A rank as a child process."""

    index: int
    process: "subprocess.Popen[bytes]"
    pipe: connection.Connection
    is_gone: bool = field(default=False)


class LocalRanks:
    """Ranks of this machine as child processes, which one thread starts, watches and ends. The thread runs as
    long as the ranks: on Linux child processes are killed when the thread that started them ends."""

    def __init__(self, places: list[RankAddress], messages: MessageQueue | None = None) -> None:
        self.places = places
        self.messages: MessageQueue = queue.SimpleQueue() if messages is None else messages
        self.end_reason: str | None = ""
        plans_fd, outcomes_fd = shm.create(len(places)), shm.create(1)
        self._plans, self._outcomes = shm.ShmWriter(plans_fd), shm.ShmReader(outcomes_fd)
        self._fds = plans_fd, outcomes_fd
        self._members: list[_Member] = []
        self._stop, self._stopped = connection.Pipe(duplex=False)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-ranks", daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def names(self) -> list[str]:
        return [place.name for place in self.places]

    @property
    def processes(self) -> list["subprocess.Popen[bytes]"]:
        return [member.process for member in self._members]

    def send_order(self, order: bytes) -> None:
        for member in self._members:
            with contextlib.suppress(OSError):  # the rank is gone, which the thread notices
                member.pipe.send_bytes(order)

    def send(self, plan: bytes, timeout_s: float) -> None:
        self._plans.send(plan, timeout_s)

    def receive(self, timeout_s: float) -> bytes | None:
        return self._outcomes.receive(timeout_s)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._stopped.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        try:
            for index, place in enumerate(self.places):
                self._members.append(self._spawn(index, place))
            self._started.set()
            while not self._poll():
                pass
        except Exception as error:
            log.exception("Starting or monitoring the worker processes failed")
            self.messages.put((0, RankEnded(str(error))))
        finally:
            self._started.set()
            self._end_all()

    def _spawn(self, index: int, place: RankAddress) -> _Member:
        """Start a rank; multiprocessing is not used, since it would import the main module again."""
        parent_end, child_end = socket.socketpair()
        with child_end:
            fds = child_end.fileno(), *self._fds
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _ENTRY, *map(str, fds), str(index)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        pipe = connection.Connection(parent_end.detach())
        pipe.send_bytes(pickle.dumps(place))
        return _Member(index, process, pipe)

    def _poll(self) -> bool:
        """Read the messages of ranks and detect lost ranks; return whether the group is to end."""
        alive = [member for member in self._members if not member.is_gone]
        ready = connection.wait([self._stop, *(member.pipe for member in alive)], LOOK_S)
        for member in alive:
            if member.pipe in ready:
                self._receive(member)
            elif member.process.poll() is not None:
                self._note_gone(member)
        return self._stop in ready

    def _receive(self, member: _Member) -> None:
        try:
            self.messages.put((member.index, decode_from_rank(member.pipe.recv_bytes())))
        except (EOFError, OSError):
            self._note_gone(member)

    def _note_gone(self, member: _Member) -> None:
        member.is_gone = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(LOOK_S)
        self.messages.put((member.index, RankEnded(_describe_end(member.process))))

    def _end_all(self) -> None:
        """End the ranks by closing their pipes; kill those that do not end in time."""
        for member in self._members:
            member.pipe.close()
        deadline = time.monotonic() + END_S
        for member in self._members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(deadline - time.monotonic(), 0))
            if member.process.poll() is None:
                member.process.kill()
                member.process.wait()
        for fd in self._fds:
            os.close(fd)


def _describe_end(process: "subprocess.Popen[bytes]") -> str:
    code = process.returncode
    if code is None:
        return f"pid {process.pid} closed its pipe"
    if code < 0:
        return f"pid {process.pid} was killed by {signal.Signals(-code).name}"
    return f"pid {process.pid} ended with exit code {code}"
