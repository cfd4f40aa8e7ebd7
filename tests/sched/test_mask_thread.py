"""A thread that works beside its owner."""

import sys
import threading

import pytest

from quire.sched.mask_thread import MaskThread

WAIT_S = 60


def test_work_goes_on_beside_and_its_error_comes_to_who_waits() -> None:
    beside, may_end, done = MaskThread("test-beside"), threading.Event(), []
    for number in range(3):
        may_end.clear()

        def work(number: int = number) -> None:
            assert may_end.wait(WAIT_S)
            done.append(number)
            if number == 1:
                raise ValueError("one")

        beside.begin(work)
        assert len(done) == number, "begin has waited for the end"
        may_end.set()
        if number == 1:
            with pytest.raises(ValueError, match="one"):
                beside.wait()
        else:
            beside.wait()
    assert done == [0, 1, 2]


def test_who_works_beside_has_the_interpreter_soon_and_others_as_before() -> None:
    usual, beside, seen = sys.getswitchinterval(), MaskThread("test-beside"), list[float]()
    beside.begin(lambda: seen.append(sys.getswitchinterval()))
    beside.wait()
    assert seen[0] < usual == sys.getswitchinterval()


def test_the_thread_ends_with_its_owner() -> None:
    threads = set(threading.enumerate())
    beside = MaskThread("test-beside")
    (mine,) = set(threading.enumerate()) - threads
    del beside
    mine.join(WAIT_S)
    assert not mine.is_alive()
