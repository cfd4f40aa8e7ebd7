"""Tests of requests in flight: they end with their client and with the drain."""

import asyncio
from typing import Any

import pytest

from quire.errors import EngineError
from quire.server.http.in_flight import Answering, ClientGone


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def disconnected() -> dict[str, Any]:
    return {"type": "http.disconnect"}


class Work:
    def __init__(self) -> None:
        self.cancelled = False
        self.begun = asyncio.Event()

    async def run(self, result: int | None = None) -> int:
        self.begun.set()
        try:
            if result is None:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            assert result is not None
            return result
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def test_result_is_returned_and_no_task_is_left() -> None:
    async def go() -> None:
        running = Answering()
        assert await running.until_gone(never, Work().run(3)) == 3
        assert len(running) == 0 and len(asyncio.all_tasks()) == 1

    asyncio.run(go())


def test_work_is_cancelled_when_the_client_disconnects() -> None:
    async def go() -> None:
        running, work = Answering(), Work()
        with pytest.raises(ClientGone):
            await running.until_gone(disconnected, work.run())
        assert work.cancelled and len(running) == 0

    asyncio.run(go())


def test_work_is_cancelled_with_its_handler() -> None:
    async def go() -> None:
        running, work = Answering(), Work()
        task = asyncio.create_task(running.until_gone(never, work.run()))
        await work.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.cancelled and len(running) == 0

    asyncio.run(go())


def test_abort_ends_running_and_later_requests() -> None:
    async def go() -> None:
        running, work = Answering(), Work()
        task = asyncio.create_task(running.until_gone(never, work.run()))
        await work.begun.wait()
        running.abort()
        with pytest.raises(EngineError, match="shutting down"):
            await task
        with pytest.raises(EngineError, match="shutting down"):
            await running.until_gone(never, Work().run())

    asyncio.run(go())
