"""Time limit for Python code, which is interrupted in its thread."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import RequestError


class _TimeIsUp(BaseException):
    """Interrupts the code; a BaseException, so that the code does not catch it."""


@contextmanager
def limited(seconds: float | None, what: str) -> Iterator[None]:
    """Raise a RequestError that names `what` if the block runs longer than `seconds`. None sets no limit; a
    limit costs a timer thread."""
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
            _raise_in(thread, None)  # clears an interrupt that is still pending
    except _TimeIsUp:
        raise RequestError(f"{what} took longer than {seconds:g} s; send less or a simpler one") from None
    finally:
        timer.cancel()


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    raised = ctypes.py_object(kind) if kind else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
