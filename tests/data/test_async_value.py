"""Tests of values that another thread computes, and of their callbacks."""

import threading

from quire.data.async_value import AsyncValue

WAIT_S = 60


def test_callback_runs_once_in_any_order() -> None:
    before, after, done = AsyncValue(), AsyncValue(), list[str]()
    before.then(lambda: done.append("before"))
    assert not before.is_ready and not done
    before.arrive()
    after.arrive()
    after.then(lambda: done.append("after"))
    assert before.is_ready and done == ["before", "after"]
    for coming in (before, before, after):
        coming.wait()


def test_waiter_sees_the_effect_of_callbacks() -> None:
    coming, done = AsyncValue(), list[int]()
    coming.then(lambda: done.append(1))
    seen = list[list[int]]()
    thread = threading.Thread(target=lambda: (coming.wait(), seen.append(list(done))))
    thread.start()
    coming.arrive()
    thread.join(WAIT_S)
    assert seen == [[1]]
