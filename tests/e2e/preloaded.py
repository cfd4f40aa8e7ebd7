"""Servers that start without the seconds that their imports take.

One process imports Quire and torch; every server is forked from it, and forks its child processes where it
would spawn them. Arguments and open files are those of a spawned process. Only the imports are shared: the
server that most tests share, those of the guide and the default model are full processes, and so test the
imports."""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

_MAX_ORDER_BYTES = 1 << 20
_MODULES = (
    *("quire.entrypoints.launch", "quire.server.main", "quire.core.process", "quire.executor.inprocess"),
    *(
        "quire.executor.worker_process",
        "quire.worker.worker",
        "quire.parallel.world",
        "quire.models.llama",
        "torch",
    ),
    *("safetensors", "tokenizers", "llguidance", "numpy", "uvicorn"),
)


# ---- in the process of the tests


class Preloaded:
    """Process that servers are forked from."""

    def __init__(self) -> None:
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(child_socket.fileno())],
                pass_fds=[child_socket.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()

    def open(
        self, argv: Sequence[str], *, environment: Mapping[str, str], cwd: Path | None, log: Path
    ) -> "ForkedServer":
        """Run the `quire` command with these arguments; `log` receives its output."""
        order = {"argv": [*argv], "environment": {**environment}, "cwd": str(cwd or Path.cwd())}
        status, written = os.pipe()
        with log.open("wb") as output:
            fds = [written, output.fileno()]
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
        os.close(written)
        return ForkedServer(status)


class ForkedServer:
    """The part of `subprocess.Popen` that tests of servers use."""

    def __init__(self, status: int) -> None:
        """`status` is the end of a pipe: it yields the process id, and later the exit code."""
        self._status = os.fdopen(status, "rb", buffering=0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._status, selectors.EVENT_READ)
        self.pid = self._read()
        self.returncode: int | None = None

    def _read(self) -> int:
        return int.from_bytes(self._status.read(8) or b"", "little", signed=True)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._selector.select(timeout):
                raise subprocess.TimeoutExpired("quire serve", timeout or 0)
            self.returncode = self._read()
            self._selector.close()
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


# ---- in the forked processes


def run_forked(code: str, argv: Sequence[str], keep_fds: Sequence[int]) -> int:
    """Fork a process that does what `python -c code argv...` would, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process._parent_process = None  # type: ignore[attr-defined]  # `spawn_main` sets it
    _close_all_but(keep_fds)
    sys.argv = ["-c", *argv]
    _leave(lambda: exec(code, {"__name__": "__main__"}))
    raise AssertionError("a forked process never returns")


def _close_all_but(keep_fds: Sequence[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in keep_fds:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
                os.close(fd)


def _leave(run: Callable[[], object]) -> None:
    """End this process with the exit code that Python would use, without running its parent's code."""
    code = 1
    try:
        result = run()
        code = result if isinstance(result, int) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _spawn(path: str, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
    """Replace multiprocessing's function, which executes `path` with `-c` and code among `args`."""
    words = [os.fsdecode(word) for word in args]
    place = words.index("-c") + 1
    return run_forked(words[place], words[place + 1 :], passfds)


class ForkedRank:
    """The part of `subprocess.Popen` that an executor uses, for a forked rank."""

    def __init__(self, args: Sequence[str], *, pass_fds: Sequence[int], **_: object) -> None:
        place = args.index("-c") + 1
        self.pid = run_forked(args[place], args[place + 1 :], pass_fds)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve(order: dict[str, Any], output: int) -> None:
    """Become the server that `order` describes."""
    from quire import logs
    from quire.cli import main
    from quire.executor import worker_group

    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in (1, 2):
        os.dup2(output, fd)
    _close_all_but(())
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    logs._root.cache_clear()
    logs.get_logger("quire")
    util.spawnv_passfds = _spawn  # type: ignore[assignment]
    worker_group.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedRank})  # type: ignore[assignment]
    _leave(lambda: main(order["argv"]))


# ---- in the process that servers are forked from


def _preload() -> None:
    import importlib

    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _run(orders: socket.socket) -> None:
    """Fork a server for every order, and report the end of each, until the socket is closed."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status_of: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is wake:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
                continue
            data, fds, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, 2)
            if not data:
                return
            status, output = fds
            pid = os.fork()
            if not pid:
                _serve(json.loads(data), output)
            os.close(output)
            os.write(status, pid.to_bytes(8, "little", signed=True))
            status_of[pid] = status
        _reap(status_of)


def _reap(status_of: dict[int, int]) -> None:
    for pid in [*status_of]:
        ended, result = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = status_of.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(status, os.waitstatus_to_exitcode(result).to_bytes(8, "little", signed=True))
            os.close(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _preload()
    with socket.socket(fileno=int(sys.argv[1])) as given_orders:
        _run(given_orders)
    os._exit(0)  # skip library teardown, which prints warnings
