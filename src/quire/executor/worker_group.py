"""Crews: the ranks of an engine wherever they run, and those of this machine as processes."""

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

from quire.executor.messages import Gone, Word, decode_word
from quire.executor.worker_process import RankAddress
from quire.logs import get_logger
from quire.system import shm

log = get_logger(__name__)

Heard = queue.SimpleQueue[tuple[int, Word]]
"""What ranks said, each by its place in the crew, in the order of arrival."""
LOOK_S = 0.5
END_S = 2.0
"""For ranks to end by themselves."""
_ENTRY = "from quire.executor.worker_process import main; main()"


class WorkerGroup(Protocol):
    """The ranks of an engine, as the executor reaches them."""

    heard: Heard

    @property
    def names(self) -> list[str]: ...

    farewell: str | None
    """Why it ends, for those elsewhere: the empty string if it is over, None if they may come again."""

    def tell(self, order: bytes) -> None:
        """All of them."""

    def send(self, plan: bytes, timeout_s: float) -> None:
        """To all of them."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next outcome of a step; None if there is none in time."""

    def end(self) -> None:
        """All of them; nothing is left."""


@dataclass
class _Member:
    """A child process that is a rank."""

    index: int
    process: "subprocess.Popen[bytes]"
    pipe: connection.Connection
    is_gone: bool = field(default=False)


class LocalCrew:
    """Ranks of this machine: children, tied to the thread that started them, which lives until the end."""

    def __init__(self, places: list[RankAddress], heard: Heard | None = None) -> None:
        self.places = places
        self.heard: Heard = queue.SimpleQueue() if heard is None else heard
        self.farewell: str | None = ""
        plans_fd, outcomes_fd = shm.create(len(places)), shm.create(1)
        self._plans, self._outcomes = shm.ShmWriter(plans_fd), shm.ShmReader(outcomes_fd)
        self._fds = plans_fd, outcomes_fd
        self._members: list[_Member] = []
        self._stop, self._stopped = connection.Pipe(duplex=False)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._tend, name="quire-ranks", daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def names(self) -> list[str]:
        return [place.name for place in self.places]

    @property
    def processes(self) -> list["subprocess.Popen[bytes]"]:
        return [member.process for member in self._members]

    def tell(self, order: bytes) -> None:
        for member in self._members:
            with contextlib.suppress(OSError):  # it is gone, which will be heard
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

    def _tend(self) -> None:
        try:
            for index, place in enumerate(self.places):
                self._members.append(self._spawn(index, place))
            self._started.set()
            while not self._look():
                pass
        except Exception as error:
            log.exception("The ranks cannot be started or watched")
            self.heard.put((0, Gone(str(error))))
        finally:
            self._started.set()
            self._end_all()

    def _spawn(self, index: int, place: RankAddress) -> _Member:
        """Not by multiprocessing, which would run the caller's main module once more."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = theirs.fileno(), *self._fds
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _ENTRY, *map(str, fds), str(index)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)},
            )
        pipe = connection.Connection(ours.detach())
        pipe.send_bytes(pickle.dumps(place))
        return _Member(index, process, pipe)

    def _look(self) -> bool:
        """Hear what is said, and see who is gone; whether the end was asked for."""
        there = [member for member in self._members if not member.is_gone]
        ready = connection.wait([self._stop, *(member.pipe for member in there)], LOOK_S)
        for member in there:
            if member.pipe in ready:
                self._hear(member)
            elif member.process.poll() is not None:
                self._note_gone(member)
        return self._stop in ready

    def _hear(self, member: _Member) -> None:
        try:
            self.heard.put((member.index, decode_word(member.pipe.recv_bytes())))
        except (EOFError, OSError):
            self._note_gone(member)

    def _note_gone(self, member: _Member) -> None:
        member.is_gone = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(LOOK_S)
        self.heard.put((member.index, Gone(_how(member.process))))

    def _end_all(self) -> None:
        """They end when their pipe does; who is stopped or busy is killed."""
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


def _how(process: "subprocess.Popen[bytes]") -> str:
    code = process.returncode
    if code is None:
        return f"pid {process.pid} closed its pipe"
    if code < 0:
        return f"pid {process.pid} was killed by {signal.Signals(-code).name}"
    return f"pid {process.pid} ended with exit code {code}"
