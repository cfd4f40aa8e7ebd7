"""Tests of the mask thread."""

import sys
import threading

import pytest

from quire.sched.mask_thread import MaskThread

WAIT_S = 60


def test_work_runs_in_background_and_wait_raises_its_error() -> None:
    mask_thread, may_end, done = MaskThread("test-beside"), threading.Event(), []
    for number in range(3):
        may_end.clear()

        def work(number: int = number) -> None:
            assert may_end.wait(WAIT_S)
            done.append(number)
            if number == 1:
                raise ValueError("one")

        mask_thread.begin(work)
        assert len(done) == number, "begin has waited for the end"
        may_end.set()
        if number == 1:
            with pytest.raises(ValueError, match="one"):
                mask_thread.wait()
        else:
            mask_thread.wait()
    assert done == [0, 1, 2]


def test_switch_interval_is_short_only_while_working() -> None:
    usual, mask_thread, seen = sys.getswitchinterval(), MaskThread("test-beside"), list[float]()
    mask_thread.begin(lambda: seen.append(sys.getswitchinterval()))
    mask_thread.wait()
    assert seen[0] < usual == sys.getswitchinterval()


def test_thread_ends_with_its_owner() -> None:
    threads = set(threading.enumerate())
    mask_thread = MaskThread("test-beside")
    (thread,) = set(threading.enumerate()) - threads
    del mask_thread
    thread.join(WAIT_S)
    assert not thread.is_alive()
