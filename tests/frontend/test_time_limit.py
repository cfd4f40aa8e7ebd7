"""Work is broken off when its time is up, and only then."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from quire.errors import RequestError
from quire.frontend.time_limit import limited


def in_a_thread(work: object) -> list[object]:
    """What came of it: its result, or the error."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())  # type: ignore[operator]
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return found


def test_endless_work_ends_with_an_error_that_names_it() -> None:
    def work() -> None:
        with limited(0.1, "counting"):
            while True:
                pass

    (error,) = in_a_thread(work)
    assert isinstance(error, RequestError) and "counting took longer than 0.1 s" in str(error)


def test_work_cannot_swallow_the_end() -> None:
    def work() -> None:
        with limited(0.1, "counting"):
            while True:
                with suppress(Exception):
                    time.sleep(0.001)

    (error,) = in_a_thread(work)
    assert isinstance(error, RequestError)


class TimerByHand:
    """A timer whose time is up when the test says so."""

    made: "list[TimerByHand]" = []

    def __init__(self, seconds: float, interrupt: Callable[[], None]) -> None:
        self.interrupt = interrupt
        self.made.append(self)

    def start(self) -> None: ...

    def cancel(self) -> None: ...


def test_what_is_done_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the timer's thread is late, and looks whether the work is over after its end."""
    monkeypatch.setattr(threading, "Timer", TimerByHand)
    monkeypatch.setattr(TimerByHand, "made", [])

    def rest() -> None:
        for _ in range(1000):  # an interrupt would arrive here
            pass

    def work() -> int:
        with limited(0.01, "a moment"):
            pass
        TimerByHand.made[-1].interrupt()
        rest()
        with pytest.raises(KeyError), limited(5.0, "failing"):
            raise KeyError
        TimerByHand.made[-1].interrupt()
        rest()
        with pytest.raises(RequestError, match="a while took longer than 3 s"), limited(3.0, "a while"):
            TimerByHand.made[-1].interrupt()
            rest()
        return 7

    assert in_a_thread(work) == [7]
