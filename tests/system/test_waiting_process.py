"""Tests of WaitingProcess: it runs one function, with what it has prepared, and never outlives its parent."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection

import pytest

from quire.system.child import Child
from quire.system.waiting_process import WaitingProcess

PATIENCE_S = 60.0
"""Timeout of a test that hangs."""
PREPARED = "QUIRE_TEST_PREPARED"


def prepares() -> None:
    os.environ[PREPARED] = "1"


def fails() -> None:
    raise RuntimeError("the preparation failed")


def reports(word: str, parent: connection.Connection) -> None:
    parent.send((os.getpid(), word, PREPARED in os.environ))


@contextmanager
def waiting(prepare: Callable[[], object]) -> Iterator[WaitingProcess]:
    process = WaitingProcess(prepare, "waiting")
    try:
        yield process
    finally:
        process.close()


@pytest.mark.parametrize(("prepare", "is_prepared"), [(prepares, True), (fails, False)])
def test_call_runs_in_the_prepared_process(prepare: Callable[[], object], is_prepared: bool) -> None:
    """Catches a preparation whose error ends the process before the function can report it."""
    here, there = multiprocessing.Pipe(duplex=False)
    with waiting(prepare) as process:
        started = process.call(reports, ("word",), there)
        there.close()
        assert started is not None and here.poll(PATIENCE_S)
        assert here.recv() == (started.pid, "word", is_prepared)
        started.join(PATIENCE_S)
        assert started.exitcode == 0


def test_used_or_dead_process_refuses_a_call() -> None:
    """Catches a restart that is sent to the process of the first start."""
    _, there = multiprocessing.Pipe(duplex=False)
    with waiting(fails) as process:
        assert process.call(reports, ("first",), there) is not None
        assert process.call(reports, ("second",), there) is None
    with waiting(fails) as process:
        os.kill(process._process.pid or 0, signal.SIGKILL)
        process._process.join(PATIENCE_S)
        assert process.call(reports, ("word",), there) is None


def test_process_without_a_call_ends() -> None:
    with waiting(fails) as process:
        pass
    assert not process._process.is_alive()


def test_process_ends_when_its_parent_closes_the_connection() -> None:
    """Catches a process that waits for ever after its parent was killed."""
    process = WaitingProcess(fails, "waiting")
    process._calls.close()
    process._process.join(PATIENCE_S)
    assert process._process.exitcode == 0


def test_child_starts_in_a_waiting_process_once() -> None:
    """Catches a supervised process that is started again although it runs."""
    with waiting(prepares) as process:

        def make(parent: connection.Connection) -> multiprocessing.process.BaseProcess:
            context = multiprocessing.get_context("spawn")
            return process.call(reports, ("word",), parent) or context.Process(
                target=reports, args=("word", parent)
            )

        pids = []
        for is_prepared in (True, False):
            child = Child("a child", make)
            child.start()
            assert child.process is not None and child.says is not None and child.says.poll(PATIENCE_S)
            assert child.says.recv() == (child.process.pid, "word", is_prepared)
            pids.append(child.process.pid)
            child.process.join(PATIENCE_S)
            child.end(signal.SIGKILL, PATIENCE_S)
        assert pids[0] != pids[1]
