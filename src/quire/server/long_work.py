"""Work on long texts that asks nothing of the model: only so much of it is done at once, for all keys."""

from asyncio import Semaphore
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

_LONG_BYTES = 1 << 14
_AT_ONCE = 2
"""Long bodies that are worked on at once by an API process. The threads are shared with the prompts of other
requests, and tokenizing takes about a hundred times the memory of the text."""


class LongWork:
    """The places of long bodies. Short ones need none."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = Semaphore(at_once)

    @asynccontextmanager
    async def place(self, request: Request) -> AsyncIterator[None]:
        """Wait for a place, if the body is long or came without its length; the first to ask is the first."""
        length = request.headers.get("content-length")
        if length is not None and int(length) < _LONG_BYTES:
            yield
            return
        async with self._places:
            yield
