"""Tests of compiling and loading the C kernels: caching, concurrency and errors."""

import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from preloaded import Preloaded

from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.native import NativeError, build, find_compiler, openmp_in_process

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler here")
SMALL = (
    "#include <omp.h>\nint quire_answer(void) { int n = 0;\n#pragma omp parallel\n{ n = 42; }\nreturn n; }\n"
)

RUN_C = (native.SOURCES / "run.c").read_text()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the C sources with a small one."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "small.c").write_text(SMALL)
    monkeypatch.setattr(native, "SOURCES", sources)
    return sources


@needs_compiler
def test_second_load_does_not_compile(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(tmp_path / "k", ["cc"]).quire_answer() == 42
    monkeypatch.setattr(native, "_compile", None)
    assert build(tmp_path / "k", ["cc"]).quire_answer() == 42
    assert [path.suffix for path in (tmp_path / "k").iterdir() if path.suffix != ".lock"] == [".so"]


@needs_compiler
def test_changed_source_is_recompiled(small: Path, tmp_path: Path) -> None:
    """Check that no stale library is loaded after an upgrade."""
    build(tmp_path / "k", ["cc"])
    (small / "small.c").write_text(SMALL.replace("42", "43"))
    assert build(tmp_path / "k", ["cc"]).quire_answer() == 43


@needs_compiler
def test_changed_header_is_recompiled(small: Path, tmp_path: Path) -> None:
    build(tmp_path / "k", ["cc"])
    (small / "new.h").write_text("#define NEW\n")
    build(tmp_path / "k", ["cc"])
    assert len(list((tmp_path / "k").glob("*.so"))) == 2


@needs_compiler
def test_other_flags_give_another_library(small: Path, tmp_path: Path) -> None:
    """Check that no library of another CPU path is loaded."""
    (small / "small.c").write_text("int quire_answer(void) { return ANSWER; }\n")
    for answer in (1, 2):
        assert build(tmp_path / "k", ["cc"], (f"-DANSWER={answer}",)).quire_answer() == answer


@needs_compiler
def test_broken_file_in_the_cache_is_replaced(small: Path, tmp_path: Path) -> None:
    build(tmp_path / "k", ["cc"])
    (path,) = (tmp_path / "k").glob("*.so")
    broken = tmp_path / "other" / path.name
    broken.parent.mkdir()
    broken.write_bytes(b"half a file")
    assert build(broken.parent, ["cc"]).quire_answer() == 42
    assert broken.stat().st_size > 100


@needs_compiler
def test_concurrent_processes_compile_once(tmp_path: Path, preloaded: Preloaded) -> None:
    """Check that no process loads a half-written library."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "small.c").write_text(SMALL)
    code = (
        "import pathlib, sys; from quire.kernels.cpu import native;"
        f"native.SOURCES = pathlib.Path({str(sources)!r});"
        f"sys.exit(native.build(pathlib.Path({str(tmp_path / 'k')!r}), ['cc']).quire_answer() != 42)"
    )
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    running = [preloaded.run_code(["-c", code], environment=os.environ, log=log) for log in logs]
    codes = [process.wait(300) for process in running]
    output = [log.read_text() for log in logs]
    assert codes == [0, 0, 0], output
    assert sum("Compiled" in text for text in output) == 1


def test_configured_compiler_is_used() -> None:
    assert find_compiler(f"{sys.executable} -x") == [sys.executable, "-x"]
    with pytest.raises(NativeError, match="CC='no-such-cc' is not a program; install"):
        find_compiler("no-such-cc")


@needs_compiler
def test_compile_error_names_the_source(small: Path, tmp_path: Path) -> None:
    (small / "small.c").write_text("int x = ;\n")
    with pytest.raises(NativeError, match=r"cc failed: .*small\.c:1.*error"):
        build(tmp_path / "k", ["cc"])


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Return the log records of a fresh load without a compiler."""
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(native.log, "handle", records.append)
    monkeypatch.setenv("CC", f"missing-{time.monotonic_ns()}")
    native.library.cache_clear()
    yield records
    native.library.cache_clear()


def test_missing_compiler_gives_one_warning(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_CPU_KERNELS", raising=False)
    assert native.library() is None
    assert native.library() is None
    (record,) = records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert "No native CPU kernels (CC=" in message and "slower" in message


def test_disabled_kernels_give_no_warning(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    assert native.library() is None
    assert native.library() is None
    (record,) = records
    assert record.levelname == "INFO" and "QUIRE_CPU_KERNELS=torch" in record.getMessage()


def test_requested_path_is_not_replaced_by_another(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a test of one path does not run on another."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "c")
    with pytest.raises(
        ConfigError, match=r"QUIRE_CPU_KERNELS=c: the C kernels cannot be compiled \(CC=.*or set"
    ):
        native.library()
    assert not records


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_memory_of_a_step_is_reused(preloaded: Preloaded, tmp_path: Path) -> None:
    """Check that activations are not returned to the system in each step."""
    code = (
        "import resource, torch; from quire.kernels.cpu import native; native.keep_freed_memory()\n"
        "def step(): pieces = [torch.empty(1 << 18).zero_() for _ in range(40)]\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "step(); step(); before = faults(); step(); print(faults() - before)"
    )
    log = tmp_path / "log"
    assert preloaded.run_code(["-c", code], environment=os.environ, log=log).wait(300) == 0, log.read_text()
    assert int(log.read_text()) < 2000  # of 10240 pages


def test_openmp_runtime_of_torch_is_used(tmp_path: Path) -> None:
    """Check that there are not two thread pools on the same cores."""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f-80 r-xp 00 00:00 1    /x/torch/lib/libgomp-a34b3233.so.1\n7f-80 r--p 0 0 2  /x/libc.so.6\n"
    )
    assert openmp_in_process(maps) == "/x/torch/lib/libgomp-a34b3233.so.1"
    maps.write_text("7f-80 r--p 0 0 2  /x/libc.so.6\n")
    assert openmp_in_process(maps) is None
    assert openmp_in_process(tmp_path / "none") is None


@needs_compiler
def test_kernel_is_called_by_every_thread(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for work done twice or by one thread only, and for jobs read after they are freed."""
    (small / "run.c").write_text(RUN_C)
    (small / "small.c").write_text(
        "#include <omp.h>\ntypedef struct { long *counts; long size; double step; } Job;\n"
        "void quire_count(const Job *job) {\n#pragma omp atomic\njob->counts[0]++;\n"
        "#pragma omp for\nfor (long i = 1; i < job->size; i++) job->counts[i] += (long)job->step; }\n"
    )
    built = build(tmp_path / "k", ["cc"])
    monkeypatch.setattr(native, "library", lambda: built)
    native._runner.cache_clear()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            counts = torch.zeros(100, dtype=torch.int64)
            native.Kernel("quire_count", "counts", "size", "step")((counts,), 100, 7.0)
            assert counts.tolist() == [threads] + [7] * 99
    finally:
        torch.set_num_threads(before)
        native._runner.cache_clear()
