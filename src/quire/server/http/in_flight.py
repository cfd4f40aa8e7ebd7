"""The running requests. Each is cancelled when its client disconnects, and all when a drain times out. Long
texts that need no model, such as those to tokenize, are limited in number."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from quire.errors import EngineError

T = TypeVar("T")

_LONG_BYTES = 1 << 14
_AT_ONCE = 2
"""Long bodies that an API process handles at once. They share the threads with the prompts of other requests,
and tokenization takes about a hundred times the memory of the text."""


class ClientGone(Exception):
    """The client has disconnected."""


class Answering:
    """The set of running requests."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._aborted = False

    def __len__(self) -> int:
        return len(self._tasks)

    def abort(self) -> None:
        """Cancel all requests; their clients receive an error."""
        self._aborted = True
        for task in self._tasks:
            task.cancel()

    async def until_gone(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Cancel it if the client disconnects (ClientGone) or `abort` is
        called."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_wait_for_disconnect(receive))
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
            del task, gone  # breaks the reference cycle of tasks, error and frame


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class LongWork:
    """Semaphore for requests with long bodies; short ones pass freely."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def place(self, request: Request) -> AsyncIterator[None]:
        """Wait, in order of arrival, while too many requests with long or chunked bodies are running."""
        length = request.headers.get("content-length")
        if length is not None and int(length) < _LONG_BYTES:
            yield
            return
        async with self._places:
            yield
