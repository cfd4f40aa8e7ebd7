"""`Search`: lookup of adapters in stores that may not respond."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from quire.errors import EngineDead

T = TypeVar("T")

SEARCH_S = 600.0
"""Seconds that a lookup may take, including a large download."""
_MAX_THREADS = 4


class Search:
    """Runs blocking lookups in a few threads. A caller gets an error after `SEARCH_S`; a thread that does
    not finish keeps its slot until the process ends."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_MAX_THREADS)

    async def __call__(self, call: Callable[[str], T], place: str) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SEARCH_S):
                await self._slots.acquire()
                future: asyncio.Future[T] = loop.create_future()

                def work() -> None:
                    try:
                        set_outcome = partial(future.set_result, call(place))
                    except Exception as error:
                        set_outcome = partial(future.set_exception, error)
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(self._end, future, set_outcome)

                threading.Thread(target=work, name="adapters", daemon=True).start()
                return await future
        except TimeoutError:
            raise EngineDead(
                f"the location of the adapter has not responded within {SEARCH_S:g} s; try again later"
            ) from None

    def _end(self, future: asyncio.Future[T], set_outcome: Callable[[], None]) -> None:
        self._slots.release()
        if not future.done():  # the caller still waits
            set_outcome()
