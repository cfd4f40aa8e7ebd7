"""Running requests: their cancellation, the limit of concurrent long bodies, and the fair order in which
handlers begin on the event loop."""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from quire.errors import EngineError
from quire.server.http.errors import ClientDisconnected

T = TypeVar("T")

LONG_BYTES = 1 << 14
"""Size in bytes from which a body is long; a chunked body counts as long."""
MAX_LONG_BODIES = 2
"""Number of long bodies, such as those of /tokenize, that an API process handles at once. They share the
threads with the prompts of other requests, and tokenization takes about 100 times the text's memory."""

_TURN_S = 0.004
"""Seconds within one iteration of the event loop in which new handlers may begin."""


def is_disconnected(receive: Receive) -> bool:
    return bool(getattr(getattr(receive, "__self__", None), "disconnected", False))


class RunningRequests:
    """The running requests. One is cancelled when its client disconnects, all are cancelled when a shutdown
    exceeds its time limit."""

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

    async def until_disconnect(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Cancel it if the client disconnects (ClientDisconnected) or `abort` is
        called."""
        task = asyncio.create_task(work)
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        self._tasks.add(task)
        if self._aborted:
            task.cancel()
        try:
            await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            if self._aborted:
                raise EngineError("the server is shutting down and this request did not finish in time")
            raise ClientDisconnected
        finally:
            self._tasks.discard(task)
            task.cancel()
            disconnect.cancel()
            await asyncio.gather(task, disconnect, return_exceptions=True)
            del task, disconnect  # breaks the reference cycle of tasks, error and frame


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def num_body_bytes(request: Request) -> int:
    """Return the length of a body in bytes; a chunked body has an unknown length: `sys.maxsize`."""
    return int(request.headers.get("content-length", sys.maxsize))


class HandlerQueue:
    """Limit of the handlers that begin in one turn (iteration) of the event loop.

    A handler parses a body, tokenizes it and starts its requests without yielding to the event loop. If many
    requests arrive at once, only a few begin. The others wait for later turns, so that streams and health
    checks continue in between. Each turn resumes one waiting handler, with the API keys in round-robin order.
    A handler that was cancelled while it waited uses no turn.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._has_begun = False
        """Whether a handler has begun in the present turn of the event loop."""
        self._ends_at = 0.0
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}
        """Waiting requests by the number of their API key; the first key is the next whose request begins."""

    async def wait(self, tenant: int) -> None:
        """Return when the handler of a request may begin: at once if the present turn of the event loop has
        time left. `tenant`: the number of the request's API key, 0 without a named key."""
        if not self._has_begun:
            self._begin()
        elif self._waiting or self._clock() >= self._ends_at:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            await turn

    def _begin(self) -> None:
        self._has_begun, self._ends_at = True, self._clock() + _TURN_S
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        """End a turn of the event loop, and let the next waiting handler begin."""
        self._has_begun = False
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the other keys
            if not turn.done():  # done if the request was cancelled
                turn.set_result(None)
                self._begin()
                return
