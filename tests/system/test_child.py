"""Tests of Child: start-up messages and restarts."""

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
"""Timeout of a test that hangs."""
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


def reports_held_signals(parent: connection.Connection) -> None:
    parent.send(None)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    parent.send(" ".join(sorted(signal.Signals(number).name for number in held)))


def child(*acts: Act) -> Child:
    """Yield a factory of children that run each of `acts` in successive lives."""
    lives = iter(acts)

    def make(parent: connection.Connection) -> BaseProcess:
        return multiprocessing.get_context("fork").Process(target=next(lives), args=(parent,))

    return Child("the thing", make)


def look_until_dead(watched: Child) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not watched.look():
        assert time.monotonic() < deadline, "the child is alive"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("act", "words"), [(refuses, "no weights"), (dies, r"the thing could not start \(exit code 7\)")]
)
def test_child_that_never_started_ends_everything(act: Act, words: str) -> None:
    watched = child(act)
    watched.start()
    with pytest.raises(ConfigError, match=words):
        look_until_dead(watched)
    watched.end(signal.SIGKILL, 1.0)


@pytest.mark.parametrize(
    ("act", "words"), [(refuses, "no weights"), (dies, "the thing could not start; see the log")]
)
def test_waiting_for_a_child_that_cannot_start(act: Act, words: str) -> None:
    watched = child(act)
    watched.start()
    with pytest.raises(ConfigError, match=words):
        asyncio.run(watched.await_up())
    watched.end(signal.SIGKILL, 1.0)
    assert watched.says is None


@pytest.mark.parametrize("second", [refuses, dies])
def test_started_child_is_restarted_whatever_its_error(second: Act) -> None:
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


def test_started_child_is_restarted_soon_after_each_death() -> None:
    """Check that requests do not wait in vain for a core that died several times within a minute."""
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


def test_cancelled_wait_leaves_no_listener() -> None:
    """Check that a listener thread does not close the descriptor that `end` closes.

    By then the number may belong to another file.
    """

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watched.await_up(), 0.05)
        assert set(threading.enumerate()) <= before
        watched.end(signal.SIGKILL, 5.0)

    watched, before = child(sleeps), set(threading.enumerate())
    watched.start()
    asyncio.run(give_up())
    assert watched.says is None


def test_interrupt_does_not_reach_a_child_that_starts() -> None:
    """Catches a traceback of each process when the user presses Ctrl-C while they import."""
    watched = child(reports_held_signals)
    watched.start()
    assert watched.says is not None
    assert [watched.says.recv(), watched.says.recv()] == [None, "SIGINT"]
    watched.end(signal.SIGKILL, PATIENCE_S)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
