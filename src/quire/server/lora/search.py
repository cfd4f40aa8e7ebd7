"""`Search`: adapters looked for in stores that may never answer."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from quire.errors import EngineDead

T = TypeVar("T")

SEARCH_S = 600.0
"""As long as a large download may take."""
_AT_ONCE = 4


class Search:
    """Runs what may take long in threads, a few at once. Who waits is told after `SEARCH_S`; a thread that
    finds no end keeps its place, and ends with the process."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def __call__(self, call: Callable[[str], T], given: str) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SEARCH_S):
                await self._turns.acquire()
                found: asyncio.Future[T] = loop.create_future()

                def work() -> None:
                    try:
                        tell = partial(found.set_result, call(given))
                    except Exception as error:
                        tell = partial(found.set_exception, error)
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(self._end, found, tell)

                threading.Thread(target=work, name="adapters", daemon=True).start()
                return await found
        except TimeoutError:
            raise EngineDead(
                f"the place of an adapter has not answered within {SEARCH_S:g} s; try again later"
            ) from None

    def _end(self, found: asyncio.Future[T], tell: Callable[[], None]) -> None:
        self._turns.release()
        if not found.done():  # somebody still waits
            tell()
