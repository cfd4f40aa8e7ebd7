"""Processes that start without the seconds that imports take.

One process imports Quire and torch. Servers are forked from it, as are the cores and ranks of engines in the
test process; they fork their own child processes where they would otherwise spawn them. Arguments and open
files are those of a spawned process.

Only the imports are shared. They are tested by the processes that start in full: the server that most tests
share, those of the plugins and the default model, and one rank."""

import contextlib
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import popen_spawn_posix, process, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

_spawnv_passfds, _SpawnPopen = util.spawnv_passfds, popen_spawn_posix.Popen
_MAX_ORDER_BYTES = 1 << 20
_MAX_FDS = 64
_MODULES = (
    *(
        "quire.entrypoints.launch",
        "quire.entrypoints.api_process",
        "quire.server.main",
        "quire.core.process",
        "quire.executor.inprocess",
    ),
    *(
        "quire.executor.worker_process",
        "quire.worker.worker",
        "quire.parallel.world",
        "quire.models.llama",
        "torch",
    ),
    *("safetensors", "tokenizers", "llguidance", "numpy", "uvicorn", "pydantic.v1"),
)


# ---- in the process of the tests


class Preloaded:
    """The process that has imported all modules, from which others are forked."""

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

    @property
    def pid(self) -> int:
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()

    def open(
        self, argv: Sequence[str], *, environment: Mapping[str, str], cwd: Path | None, log: Path
    ) -> "ForkedProcess":
        """Run the `quire` command with these arguments; `log` receives its output."""
        order = {"argv": [*argv], "environment": {**environment}, "cwd": str(cwd or Path.cwd())}
        with log.open("wb") as output:
            return self._fork(order, [output.fileno(), output.fileno()], [1, 2])

    def run_code(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        log: Path | None = None,
    ) -> "ForkedProcess":
        """Run what a Python command line with `-c` would. `log` receives its output; None: this process's
        output does."""
        place = words.index("-c") + 1
        order = {"code": words[place], "argv": [*words[place + 1 :]], "environment": {**environment}}
        order |= {"cwd": os.getcwd(), "path": sys.path, "parent": os.getpid()}
        with contextlib.ExitStack() as stack:
            outputs = [1, 2] if log is None else [stack.enter_context(log.open("wb")).fileno()] * 2
            return self._fork(order, [*outputs, *pass_fds], [1, 2, *pass_fds])

    def _fork(self, order: dict[str, Any], fds: Sequence[int], numbers: Sequence[int]) -> "ForkedProcess":
        """Order a new process. It has the open files `fds` under these numbers."""
        status, written = os.pipe()
        data = json.dumps(order | {"numbers": [*numbers]}).encode()
        socket.send_fds(self._socket, [data], [written, *fds])
        os.close(written)
        return ForkedProcess(status)


class ForkedProcess:
    """A process with the methods of `subprocess.Popen` that tests and executors use."""

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

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def engines_forked(preloaded: Callable[[], Preloaded]) -> Iterator[None]:
    """Within this context, fork the cores and ranks of engines of this process instead of spawning them."""
    processes: dict[int, ForkedProcess] = {}

    def run_rank(
        words: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: object
    ) -> Any:
        return preloaded().run_code(words, environment=env, pass_fds=pass_fds)

    def spawn(path: str, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in args]
        if "--multiprocessing-fork" not in words:  # a process of multiprocessing itself
            return _spawnv_passfds(path, args, passfds)  # type: ignore[arg-type]
        forked = preloaded().run_code(words, environment=os.environ, pass_fds=passfds)
        processes[forked.pid] = forked
        return forked.pid

    class ForkedPopen(_SpawnPopen):
        """A process that is a child of the preloaded process, which reports its end."""

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            if self.returncode is None:
                forked = processes[self.pid]
                self.returncode = forked.poll() if flag == os.WNOHANG else forked.wait()
            return self.returncode

    popen = SimpleNamespace(**{**vars(subprocess), "Popen": run_rank})
    with _patched(popen, spawn, ForkedPopen):
        yield


@contextlib.contextmanager
def engines_spawned() -> Iterator[None]:
    """Within this context, spawn the cores and ranks of engines even within `engines_forked`."""
    with _patched(subprocess, _spawnv_passfds, _SpawnPopen):
        yield


@contextlib.contextmanager
def _patched(popen: Any, spawn: Callable[..., int], process_class: type) -> Iterator[None]:
    from quire.executor import worker_group

    with (
        mock.patch.object(worker_group, "subprocess", popen),
        mock.patch.object(util, "spawnv_passfds", spawn),
        mock.patch.object(popen_spawn_posix, "Popen", process_class),
    ):
        yield


# ---- in the forked processes


def run_forked(code: str, argv: Sequence[str], keep_fds: Sequence[int]) -> int:
    """Fork a process that does what `python -c code argv...` would, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    signal.set_wakeup_fd(-1)  # that of an event loop of the parent
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
    """End this process with the exit code that Python would use, without running code of its parent."""
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
    """Replace multiprocessing's function that executes the interpreter `path` with `-c` and code among
    `args`."""
    words = [os.fsdecode(word) for word in args]
    place = words.index("-c") + 1
    return run_forked(words[place], words[place + 1 :], passfds)


class ForkedRank:
    """A forked rank with the methods of `subprocess.Popen` that an executor uses."""

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


def _follow(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Become the process that `order` describes: set its files, arguments and environment, and run it."""
    from quire import logs
    from quire.cli import main
    from quire.executor import worker_group

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    numbers: list[int] = order["numbers"]
    _move_fds(fds, numbers)
    _close_all_but(numbers)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    logs._root.cache_clear()
    logs.get_logger("quire")
    util.spawnv_passfds = _spawn  # type: ignore[assignment]
    worker_group.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedRank})  # type: ignore[assignment]
    if "code" not in order:
        os.setsid()
        _leave(lambda: main(order["argv"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process._parent_process = None  # type: ignore[attr-defined]  # `spawn_main` sets it
    parent: int = order["parent"]
    os.getppid = lambda: parent  # a child process checks that its parent lives
    sys.path[:], sys.argv = order["path"], ["-c", *order["argv"]]
    _leave(lambda: exec(order["code"], {"__name__": "__main__"}))


def _move_fds(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files these numbers."""
    clear = max(*fds, *numbers) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, clear) for fd in fds]
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)


# ---- in the process that others are forked from


def _preload() -> None:
    import importlib

    for name in _MODULES:
        importlib.import_module(name)
    _declare_routes()
    gc.collect()
    gc.freeze()


def _declare_routes() -> None:
    """Build the fields of all routes once; later applications share them."""
    sys.path.append(str(Path(__file__).parents[1] / "server"))
    from fake_engine import FakeEngine
    from shared_fields import share_fields

    from quire.server.app import Application
    from quire.server.settings import make_settings

    share_fields()
    Application(FakeEngine(), make_settings({}))
    sys.path.pop()


def _run(orders: socket.socket) -> None:
    """Fork a process for every order, and report the end of each, until the socket is closed."""
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
            data, fds, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, _MAX_FDS)
            if not data:
                return
            status, *inherited = fds
            pid = os.fork()
            if not pid:
                _follow(json.loads(data), inherited)
            for fd in inherited:
                os.close(fd)
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
