"""Work is broken off when its time is up, and only then."""

import threading
import time
from contextlib import suppress

import pytest

from quire.errors import RequestError
from quire.frontend.patience import limited


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
    thread.join(20)
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


def test_what_is_done_in_time_is_left_alone() -> None:
    def work() -> int:
        for _ in range(50):
            with limited(0.01, "a moment"):
                pass
        end = time.monotonic() + 0.1
        while time.monotonic() < end:  # a late interrupt would arrive here
            pass
        with pytest.raises(KeyError), limited(5.0, "failing"):
            raise KeyError
        return 7

    assert in_a_thread(work) == [7]
