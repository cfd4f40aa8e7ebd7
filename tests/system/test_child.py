"""Child: what a process says at its start, and what follows."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import pytest

from quire.errors import ConfigError
from quire.system.child import BACKOFF_S, Child

PATIENCE_S = 60.0
"""Ends a test that hangs."""
Act = Callable[[connection.Connection], None]


def refuses(parent: connection.Connection) -> None:
    parent.send("no weights")


def dies(parent: connection.Connection) -> None:
    os._exit(7)


def serves(parent: connection.Connection) -> None:
    parent.send(None)
    time.sleep(600)


def sleeps(parent: connection.Connection) -> None:
    time.sleep(600)


def child(*acts: Act) -> Child:
    """A child that does each of `acts` in one life after the other."""
    lives = iter(acts)

    def make(parent: connection.Connection) -> BaseProcess:
        return multiprocessing.get_context("fork").Process(target=next(lives), args=(parent,))

    return Child("the thing", make)


def look_until_dead(watched: Child) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not watched.look():
        assert time.monotonic() < deadline, "it lives"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("act", "words"), [(refuses, "no weights"), (dies, r"the thing could not start \(exit code 7\)")]
)
def test_one_that_never_was_up_ends_everything(act: Act, words: str) -> None:
    watched = child(act)
    watched.start()
    with pytest.raises(ConfigError, match=words):
        look_until_dead(watched)
    watched.end(signal.SIGKILL, 1.0)


@pytest.mark.parametrize(
    ("act", "words"), [(refuses, "no weights"), (dies, "the thing could not start; see the log")]
)
def test_waiting_for_one_that_cannot_start(act: Act, words: str) -> None:
    watched = child(act)
    watched.start()
    with pytest.raises(ConfigError, match=words):
        asyncio.run(watched.await_up())
    watched.end(signal.SIGKILL, 1.0)
    assert watched.says is None


@pytest.mark.parametrize("second", [refuses, dies])
def test_one_that_was_up_is_started_again_whatever_it_says(second: Act) -> None:
    watched = child(serves, second, serves)
    watched.start()
    asyncio.run(watched.await_up())
    assert watched.is_up and watched.process is not None
    watched.process.kill()
    look_until_dead(watched)
    assert not watched.is_up and watched.restart_at is not None
    watched.start()
    look_until_dead(watched)
    assert not watched.is_up
    watched.start()
    asyncio.run(watched.await_up())
    watched.end(signal.SIGKILL, 5.0)


def test_one_that_came_up_is_started_again_soon_however_often_it_dies() -> None:
    """Catches answers that wait in vain for a core which died several times within a minute."""
    watched = child(*[serves] * 4, dies)
    for _ in range(4):
        watched.start()
        asyncio.run(watched.await_up())
        assert watched.process is not None
        watched.process.kill()
        look_until_dead(watched)
        assert watched.restart_at is not None and watched.restart_at - time.monotonic() <= BACKOFF_S[1]
    watched.start()
    look_until_dead(watched)
    assert watched.restart_at is not None and watched.restart_at - time.monotonic() > BACKOFF_S[2]


def test_who_gives_up_waiting_leaves_nobody_listening() -> None:
    """A thread that goes on hearing closes, when the child ends, what `end` closes: twice the same number,
    which may be another file by then."""

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watched.await_up(), 0.05)
        assert set(threading.enumerate()) <= before
        watched.end(signal.SIGKILL, 5.0)

    watched, before = child(sleeps), set(threading.enumerate())
    watched.start()
    asyncio.run(give_up())
    assert watched.says is None
