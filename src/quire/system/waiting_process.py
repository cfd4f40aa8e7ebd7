"""A process that is started before its task is known, and imports modules in the meantime."""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing import connection, reduction
from multiprocessing.process import BaseProcess
from typing import Any

from quire.system.process import interrupts_held, main_left_out


class WaitingProcess:
    """A spare process that calls `prepare`, such as slow imports, and then waits for one function to run.
    It ends with its parent."""

    def __init__(self, prepare: Callable[[], object], name: str) -> None:
        self._calls, child_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_wait_for_call, args=(child_end, prepare), name=name)
        self._is_used = False
        try:
            with main_left_out(), interrupts_held():
                self._process.start()
        finally:
            child_end.close()

    def call(
        self, function: Callable[..., object], args: tuple[Any, ...], parent: connection.Connection
    ) -> BaseProcess | None:
        """Let the process call `function(*args, parent)`, and return it. Return None if it was used before or
        has ended."""
        if self._is_used or not self._process.is_alive():
            return None
        try:
            self._calls.send((function, args))
            reduction.send_handle(self._calls, parent.fileno(), self._process.pid)
        except OSError:  # it has ended meanwhile
            return None
        self._is_used = True
        return self._process

    def close(self) -> None:
        """End the process if it still waits."""
        self._calls.close()
        if not self._is_used:
            self._process.kill()
            self._process.join()


def _wait_for_call(calls: connection.Connection, prepare: Callable[[], object]) -> None:
    # After an error the function that is called will meet the same error, and report it.
    with contextlib.suppress(Exception):
        prepare()
    try:
        function, args = calls.recv()
        parent = connection.Connection(reduction.recv_handle(calls), readable=False)
    except (EOFError, OSError):  # the parent has ended, or needs no process
        sys.exit(0)
    calls.close()
    function(*args, parent)
