"""The requests being answered: each ends when its client hangs up, and all of them when a drain is over."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from quire.errors import EngineError

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is left to answer."""


class Answering:
    """What is being answered right now."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._aborted = False

    def __len__(self) -> int:
        return len(self._tasks)

    def abort(self) -> None:
        """End everything; clients get an error that says why."""
        self._aborted = True
        for task in self._tasks:
            task.cancel()

    async def until_gone(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. It is cancelled when the client hangs up (ClientGone) or the drain is over."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_hung_up(receive))
        self._tasks.add(task)
        if self._aborted:
            task.cancel()
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            if self._aborted:
                raise EngineError("the server is shutting down and this request did not finish in time")
            raise ClientGone
        finally:
            self._tasks.discard(task)
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
            del task, gone  # an error knows this frame, and they know the error


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
