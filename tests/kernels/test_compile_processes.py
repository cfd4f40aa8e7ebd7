"""Tests of the processes that compile kernels: their ends, crashes and failed jobs."""

import os
import pickle
import sys
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preloaded import Preloaded

from quire.executor import worker_process
from quire.executor.worker_process import num_compilers
from quire.kernels import compile_processes as module
from quire.kernels.compile_processes import CompileProcesses, compile_processes, current_processes

ROOT = Path(__file__).parents[2]
ENTRY = """
from quire.kernels.triton import compile_server as server
server._PRELOADED, server.build_launcher = (), str
server.main()
"""
"""The entry without the kernels of models and without launchers, which import torch."""

KERNELS = """
import os
import triton
import triton.language as tl

if os.environ["CRASHES"] not in ("", str(os.getpid())):
    os._exit(1)

@triton.jit
def good(out):
    tl.store(out, 1)

@triton.jit
def wrong(out):
    tl.store(out, missing)
"""
SCRIPT = """
import logging, os, sys, threading, warnings
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[3:]
sys.stdout = open(sys.argv[2], "w")
import torch
from triton.runtime import driver
from triton import knobs
from compile_only import AbsentDriver
from quire.kernels import compile_processes as module
from quire.kernels.triton.launch import compile_ahead, compiling, launch

module._ENTRY = sys.argv[1]
driver.set_active(AbsentDriver())
knobs.compilation.listener = lambda *, src, cache_hit, **more: print(src.name, "cached", cache_hit)
logging.getLogger("quire").setLevel(logging.DEBUG)
logging.getLogger("quire").addHandler(logging.StreamHandler(sys.stdout))


def compile_kernel(name, dtype):
    import kernels

    launched = threading.Event()

    def launch_all():
        launch(getattr(kernels, name), 1)(torch.empty(1, dtype=dtype, device="meta"))
        launched.set()

    compile_ahead(launch_all)
    assert launched.wait(300)
    with compiling():
        launch_all()


for crashes, name, dtype in [(0, "good", torch.int32), (1, "good", torch.int64), (0, "wrong", torch.int32)]:
    os.environ["CRASHES"] = str(os.getpid()) if crashes else ""
    print("--", flush=True)
    with module.compile_processes(2):
        try:
            compile_kernel(name, dtype)
        except Exception as error:
            print("raised", type(error).__name__)
"""


class Exit:
    """A job that ends the process which reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> CompileProcesses:
    monkeypatch.setattr(module, "_ENTRY", ENTRY)
    monkeypatch.setattr(module, "_END_S", 300.0)
    return CompileProcesses(2)


def test_lost_processes_are_reported(processes: CompileProcesses) -> None:
    assert "UnpicklingError" in str(processes.compile(b"no job")), "the process goes on"
    reasons = [processes.compile(pickle.dumps(Exit())) for _ in range(3)]
    assert reasons == ["a compile process ended"] * 2 + ["no compile process is left"]
    processes.close()
    assert processes._process.returncode == 0


def test_all_processes_end_with_the_start(
    processes: CompileProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CompileProcesses", lambda num: processes)
    with compile_processes(2):
        assert current_processes() is processes
        processes.compile(b"no job")
    assert current_processes() is None
    assert processes._process.returncode == 0, "a process waits for its forks before it ends"
    with pytest.raises(CancelledError):
        processes.compile(b"no job")


@pytest.mark.parametrize("num", [-1, 0, 1])
def test_no_process_is_started_for_one_core(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CompileProcesses", None)
    with compile_processes(num):
        assert current_processes() is None


def test_start_goes_on_without_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(num: int) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(module, "CompileProcesses", fail)
    with compile_processes(4):
        assert current_processes() is None
    assert "this process compiles the kernels: Too many open files" in caplog.text


@pytest.mark.parametrize(
    ("device", "tp", "dp", "gib", "num"),
    [
        ("cpu", 1, 1, 900, 0),
        ("cuda", 1, 1, 900, 16),
        ("cuda", 4, 1, 900, 7),
        ("cuda", 2, 4, 900, 3),
        ("cuda", 4, 1, 12, 3),
    ],
)
def test_ranks_share_cores_and_memory(
    device: str, tp: int, dp: int, gib: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "hardware_threads", lambda: 32)
    monkeypatch.setattr(worker_process, "free_memory", lambda: gib * 2**30)
    monkeypatch.setattr(worker_process, "world_size", lambda parallel: tp)
    parallel = SimpleNamespace(data_parallel_size_local=None, data_parallel_size=dp, nnodes=1)
    config: Any = SimpleNamespace(machine=SimpleNamespace(device=device), parallel=parallel)
    assert num_compilers(config) == num


def test_crash_falls_back_to_this_process_and_a_failure_names_the_kernel(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    """Compile for an absent GPU, in a process without Triton's interpreter."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    folders, printed, log = [str(tmp_path), str(ROOT / "tests")], tmp_path / "printed", tmp_path / "log"
    paths = os.pathsep.join([*folders, *sys.path])
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
    words = ["-c", SCRIPT, ENTRY, str(printed), *folders]
    environment = os.environ | settings | {"CRASHES": ""}
    code = preloaded.run_code(words, environment=environment, log=log).wait(300)
    assert code == 0, log.read_text()
    beside, crashed, wrong = printed.read_text().split("--\n")[1:]
    assert beside.split() == ["good", "cached", "True"], "another process compiled it, once"
    assert "kernel kernels.good in this process, not in a compile process: a compile process ended" in crashed
    assert "good cached False" in crashed and "raised" not in crashed
    assert "The kernel kernels.wrong does not compile: " in wrong and "missing" in wrong
    assert "raised CompilationError" in wrong
