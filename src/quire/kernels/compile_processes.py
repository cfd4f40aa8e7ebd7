"""Processes that compile Triton kernels while this process imports modules and loads weights.

Threads would share the interpreter lock, which Triton holds while it reads a kernel's source. The compiled
kernels are passed on in Triton's cache directory. Importing this module does not import torch."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextvars import ContextVar
from multiprocessing.connection import Connection, Pipe

from quire.logs import get_logger

log = get_logger(__name__)

_ENTRY = "from quire.kernels.triton.compile_server import main; main()"
_LONGEST_S = 300.0
"""Maximum seconds for a compile process to compile a kernel; after that, this process compiles it."""
_END_S = 2.0
"""Seconds in which idle processes must end after their connections were closed; later they are killed."""
_current: ContextVar["CompileProcesses | None"] = ContextVar("compile processes", default=None)


class CompileProcesses:
    """A child process and its forks, which compile kernels for this process. Each fork has a connection to
    this process and ends when the connection is closed."""

    def __init__(self, num: int) -> None:
        self._is_closed = False
        pairs = [Pipe() for _ in range(num)]
        self._connections = [here for here, _ in pairs]
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        for here in self._connections:
            self._idle.put(here)
        fds = [there.fileno() for _, there in pairs]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _ENTRY, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        for _, there in pairs:
            there.close()

    def compile(self, job: bytes) -> str | None:
        """Compile the kernel that `job` describes (`compile_server.encode_job`) in an idle process; wait if
        all are busy. Return None, or the reason why the kernel is still not in Triton's cache. Several
        threads may call this method. After `close`, when no kernel is needed, it raises CancelledError."""
        reason = self._compile(job)
        if self._is_closed:
            raise CancelledError(reason)
        return reason

    def _compile(self, job: bytes) -> str | None:
        connection = self._idle.get()
        if connection is None:
            self._idle.put(None)  # for the other threads
            return "no compile process is left"
        try:
            connection.send_bytes(job)
            if connection.poll(_LONGEST_S):
                answer = connection.recv_bytes().decode()
                self._idle.put(connection)
                return answer or None
            reason = f"a compile process did not answer within {_LONGEST_S:.0f} s"
        except (EOFError, OSError):
            reason = "a compile process ended"
        self._lose(connection)
        return reason

    def _lose(self, connection: Connection) -> None:
        self._connections.remove(connection)
        connection.close()
        if not self._connections:
            self._idle.put(None)

    def close(self) -> None:
        """End all processes: idle ones by closing their connections, busy ones by a signal."""
        self._is_closed = True
        for connection in list(self._connections):
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def compile_processes(num: int) -> Iterator[None]:
    """Start `num` processes, by which `launch.compile_ahead` and `launch.compiling` compile kernels within
    this context. With `num` below 2, no process is started and this process compiles them."""
    if num < 2:
        yield
        return
    try:
        processes = CompileProcesses(num)
    except OSError as error:  # too many files or processes
        log.warning("Compile processes cannot be started, so this process compiles the kernels: %s", error)
        yield
        return
    token = _current.set(processes)
    try:
        yield
    finally:
        _current.reset(token)
        processes.close()


def current_processes() -> CompileProcesses | None:
    """Return the processes of the surrounding `compile_processes` context; None outside of a context."""
    return _current.get()
