"""Work that must not take long: broken off in its thread when its time is up."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import RequestError


class _TimeIsUp(BaseException):
    """Not for anybody inside the work to catch."""


@contextmanager
def limited(seconds: float | None, what: str) -> Iterator[None]:
    """A RequestError if the block, which is Python code, runs longer; None lets it run. For threads whose
    hang would go unnoticed: a timer costs a thread of its own."""
    if seconds is None:
        yield
        return
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not over:
                _raise_in(thread, _TimeIsUp)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                over = True
            _raise_in(thread, None)  # one that was sent and has not arrived
    except _TimeIsUp:
        raise RequestError(f"{what} took longer than {seconds:g} s; send less or a simpler one") from None
    finally:
        timer.cancel()


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    raised = ctypes.py_object(kind) if kind else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
