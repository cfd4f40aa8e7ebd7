"""What another thread makes, and what follows."""

import threading

from quire.data.async_value import AsyncValue

WAIT_S = 60


def test_what_follows_happens_once_whoever_is_first() -> None:
    before, after, done = AsyncValue(), AsyncValue(), list[str]()
    before.then(lambda: done.append("before"))
    assert not before.is_there and not done
    before.arrive()
    after.arrive()
    after.then(lambda: done.append("after"))
    assert before.is_there and done == ["before", "after"]
    for coming in (before, before, after):
        coming.wait()


def test_who_waits_sees_what_followed() -> None:
    coming, done = AsyncValue(), list[int]()
    coming.then(lambda: done.append(1))
    seen = list[list[int]]()
    thread = threading.Thread(target=lambda: (coming.wait(), seen.append(list(done))))
    thread.start()
    coming.arrive()
    thread.join(WAIT_S)
    assert seen == [[1]]
