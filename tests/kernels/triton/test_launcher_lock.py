"""Tests of the lock around Triton's builder of launchers."""

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.nvidia import driver

from quire.kernels.triton.launcher_lock import lock_launchers, locked


def build_if_missing(src: str, folder: Path) -> None:
    """Write a file as Triton does: it looks for the file first, and replaces it if it was not there."""
    path = folder / src
    if not path.exists():
        time.sleep(0.2)
        with (folder / "built").open("a") as log:
            log.write(f"{src}\n")
        path.touch()


def build_in_threads(cache: str, folder: Path) -> None:
    triton.knobs.cache.dir = cache
    build = locked(build_if_missing)
    threads = [threading.Thread(target=build, args=(src, folder)) for src in ("one", "two") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_and_processes_build_each_launcher_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    args = (str(tmp_path / "cache"), tmp_path)
    processes = [context.Process(target=build_in_threads, args=args) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted((tmp_path / "built").read_text().split()) == ["one", "two"]


def test_a_process_loads_each_launcher_once() -> None:
    """Check that a second load, which Python would do into a module that launchers share, does not happen."""
    loads = []
    build = locked(lambda src: loads.append(src) or object())
    first, other = build("one"), build("two")
    assert build("one") is first is not other
    assert loads == ["one", "two"]


def test_lock_is_added_once_and_only_where_launchers_are_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(src: str, name: str) -> Any:
        return src, name

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "compile_module_from_src", build, raising=False)
    lock_launchers()
    with_lock = driver.compile_module_from_src
    assert with_lock is not build
    assert with_lock(src="int x;", name="launcher") == ("int x;", "launcher")
    lock_launchers()
    assert driver.compile_module_from_src is with_lock
    monkeypatch.delattr(driver, "compile_module_from_src")
    lock_launchers()
    assert not hasattr(driver, "compile_module_from_src")


def test_launchers_are_built_without_a_lock_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").touch()  # no folder: the lock cannot be made
    assert locked(lambda src: f"built {src}")("one") == "built one"
