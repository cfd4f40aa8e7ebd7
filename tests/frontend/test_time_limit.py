"""Tests of the time limit of a function call."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from quire.errors import RequestError
from quire.frontend.time_limit import limited


def in_a_thread(work: object) -> list[object]:
    """Run it in a thread and return its result or error."""
    actual: list[object] = []

    def run() -> None:
        try:
            actual.append(work())  # type: ignore[operator]
        except BaseException as error:
            actual.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return actual


def test_endless_work_raises_an_error_that_names_it() -> None:
    def work() -> None:
        with limited(0.1, "counting"):
            while True:
                pass

    (error,) = in_a_thread(work)
    assert isinstance(error, RequestError) and "counting took longer than 0.1 s" in str(error)


def test_work_cannot_swallow_the_interrupt() -> None:
    def work() -> None:
        with limited(0.1, "counting"):
            while True:
                with suppress(Exception):
                    time.sleep(0.001)

    (error,) = in_a_thread(work)
    assert isinstance(error, RequestError)


class ManualTimer:
    """A timer that expires when the test fires it."""

    made: "list[ManualTimer]" = []

    def __init__(self, seconds: float, interrupt: Callable[[], None]) -> None:
        self.interrupt = interrupt
        self.made.append(self)

    def start(self) -> None: ...

    def cancel(self) -> None: ...


def test_work_done_in_time_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also a late timer thread, which fires after the work has ended."""
    monkeypatch.setattr(threading, "Timer", ManualTimer)
    monkeypatch.setattr(ManualTimer, "made", [])

    def rest() -> None:
        for _ in range(1000):  # an interrupt would arrive here
            pass

    def work() -> int:
        with limited(0.01, "a moment"):
            pass
        ManualTimer.made[-1].interrupt()
        rest()
        with pytest.raises(KeyError), limited(5.0, "failing"):
            raise KeyError
        ManualTimer.made[-1].interrupt()
        rest()
        with pytest.raises(RequestError, match="a while took longer than 3 s"), limited(3.0, "a while"):
            ManualTimer.made[-1].interrupt()
            rest()
        return 7

    assert in_a_thread(work) == [7]
