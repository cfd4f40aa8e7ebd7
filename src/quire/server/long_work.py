"""Limit on concurrent requests that process long texts without the model, such as tokenization."""

from asyncio import Semaphore
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

_LONG_BYTES = 1 << 14
_AT_ONCE = 2
"""Long bodies that an API process handles at once. They share the threads with the prompts of other requests,
and tokenization takes about a hundred times the memory of the text."""


class LongWork:
    """Semaphore for requests with long bodies; short ones pass freely."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = Semaphore(at_once)

    @asynccontextmanager
    async def place(self, request: Request) -> AsyncIterator[None]:
        """Wait, in order of arrival, while too many requests with long or chunked bodies are running."""
        length = request.headers.get("content-length")
        if length is not None and int(length) < _LONG_BYTES:
            yield
            return
        async with self._places:
            yield
