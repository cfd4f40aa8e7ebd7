"""A response that is answered in the background, whoever listens."""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.types import Message

from quire.errors import EngineError, QuireError
from quire.logs import get_logger
from quire.server.engine import Outputs
from quire.server.http.in_flight import Answering
from quire.server.responses.encoder import ResponseEncoder

logger = get_logger(__name__)


class BackgroundRun:
    """The outputs of a response on their way to its encoder, and its events for those who want them."""

    def __init__(
        self,
        outputs: Outputs,
        encoder: ResponseEncoder,
        *,
        keeps_events: bool,
        on_end: Callable[[], None],
    ) -> None:
        self.encoder = encoder
        self.keeps_events = keeps_events
        self.events: list[bytes] = []
        """The place of each is its sequence number."""
        self.num_bytes = 0
        """Of the events."""
        self.is_over = False
        self._outputs, self._on_end = outputs, on_end
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def start(self, answering: Answering) -> None:
        """Until it is over, or the server is told to stop."""
        self._task = asyncio.create_task(self._run(answering))

    async def _run(self, answering: Answering) -> None:
        failed: Exception | None = None
        try:
            await answering.until_gone(_never_gone, self._read())
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("a response in the background failed")
            failed = error
        try:
            await self._outputs.aclose()
        finally:
            self._end(failed)

    async def _read(self) -> None:
        async for output in self._outputs:
            self._add(self.encoder.events(output))

    def _end(self, failed: Exception | None, status: str = "failed") -> None:
        """Over for all who wait for it, even if its last words cannot be written."""
        if self.is_over:
            return
        events: list[bytes] = []
        try:
            events = self._last(failed, status)
        finally:
            self.is_over = True
            self._add(events)
            self._on_end()

    def _last(self, failed: Exception | None, status: str) -> list[bytes]:
        if failed is None:
            try:
                return self.encoder.last_events()
            except Exception as error:
                logger.exception("the end of a response could not be written")
                failed = error
        return self.encoder.failed(failed, status)

    def _add(self, events: list[bytes]) -> None:
        if self.keeps_events:
            self.events += events
            self.num_bytes += sum(map(len, events))
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def cancel(self) -> None:
        """Over when this returns, if it was not before."""
        if self._task is None or self.is_over:
            return
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
            await self._outputs.aclose()
        finally:
            self._end(EngineError("the response was cancelled"), "cancelled")

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """The events behind that number: those that were, and those to come."""
        place = after + 1
        while True:
            news = self._news
            while place < len(self.events):
                yield self.events[place]
                place += 1
            if self.is_over:
                return
            await news.wait()


async def _never_gone() -> Message:
    """The client of a response in the background may hang up."""
    await asyncio.Event().wait()
    raise AssertionError
