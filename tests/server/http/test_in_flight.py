"""Tests of requests in flight: they end with their client and with the drain."""

import asyncio
from typing import Any

import pytest

from quire.errors import EngineError
from quire.server.http.errors import ClientDisconnected
from quire.server.http.in_flight import HandlerQueue, RunningRequests


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def disconnected() -> dict[str, Any]:
    return {"type": "http.disconnect"}


class Work:
    def __init__(self) -> None:
        self.cancelled = False
        self.started = asyncio.Event()

    async def run(self, result: int | None = None) -> int:
        self.started.set()
        try:
            if result is None:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            assert result is not None
            return result
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_result_is_returned_and_no_task_is_left() -> None:
    running = RunningRequests()
    assert await running.until_disconnect(never, Work().run(3)) == 3
    assert len(running) == 0 and len(asyncio.all_tasks()) == 1


async def test_work_is_cancelled_when_the_client_disconnects() -> None:
    running, work = RunningRequests(), Work()
    with pytest.raises(ClientDisconnected):
        await running.until_disconnect(disconnected, work.run())
    assert work.cancelled and len(running) == 0


async def test_work_is_cancelled_with_its_handler() -> None:
    running, work = RunningRequests(), Work()
    task = asyncio.create_task(running.until_disconnect(never, work.run()))
    await work.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.cancelled and len(running) == 0


async def test_abort_ends_running_and_later_requests() -> None:
    running, work = RunningRequests(), Work()
    task = asyncio.create_task(running.until_disconnect(never, work.run()))
    await work.started.wait()
    running.abort()
    with pytest.raises(EngineError, match="shutting down"):
        await task
    with pytest.raises(EngineError, match="shutting down"):
        await running.until_disconnect(never, Work().run())


class Handlers:
    """Handlers of several keys that arrive at once. Each takes `seconds` on a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.turns = HandlerQueue(clock=lambda: self.now)
        self.order: list[str] = []
        self._seconds = seconds

    async def handle(self, tenant: int, name: str) -> None:
        await self.turns.wait(tenant)
        self.now += self._seconds
        self.order.append(name)

    async def run(self, *names: str) -> list[list[str]]:
        """Run a handler for each name, of the key in its first character; return those of each turn."""
        tasks = [asyncio.create_task(self.handle(int(name[0]), name)) for name in names]
        by_turn, num_seen = list[list[str]](), 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            by_turn.append(self.order[num_seen:])
            num_seen = len(self.order)
        return [names for names in by_turn if names]


async def test_short_handlers_begin_in_one_turn() -> None:
    assert (await Handlers(0.0).run("1a", "1b", "1c", "2a")) == [["1a", "1b", "1c", "2a"]]


async def test_long_handlers_begin_in_turns_of_their_own_key_by_key() -> None:
    """Catches a burst of requests that blocks the event loop until the last of them has begun, and a key
    whose single request waits for all those of another key."""
    by_turn = await Handlers(0.01).run("1a", "1b", "1c", "1d", "2a", "3a")
    assert by_turn == [["1a"], ["1b"], ["2a"], ["3a"], ["1c"], ["1d"]]


async def test_cancelled_handlers_take_no_turn() -> None:
    handlers = Handlers(0.01)
    tasks = [asyncio.create_task(handlers.handle(1, name)) for name in ("1a", "1b", "1c")]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await handlers.handle(1, "1d")
    assert handlers.order == ["1a", "1c", "1d"]
