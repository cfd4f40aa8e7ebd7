"""A response that is generated in the background, independent of client connections."""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.types import Message

from quire.errors import EngineError, QuireError
from quire.frontend.output_stream import Outputs
from quire.logs import get_logger
from quire.server.http.in_flight import Answering
from quire.server.responses.encoder import ResponseEncoder

logger = get_logger(__name__)


class BackgroundRun:
    """Feeds the engine's outputs of a response to its encoder and keeps the events for streaming clients."""

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
        """Encoded events; the index of an event is its sequence number."""
        self.num_bytes = 0
        """Total size of the events."""
        self.is_over = False
        self._outputs, self._on_end = outputs, on_end
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def start(self, answering: Answering) -> None:
        """Start generating. The run ends with the response or when the server shuts down."""
        self._task = asyncio.create_task(self._run(answering))

    async def _run(self, answering: Answering) -> None:
        failed: Exception | None = None
        try:
            await answering.until_gone(_never_gone, self._read())
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("a background response failed")
            failed = error
        try:
            await self._outputs.aclose()
        finally:
            self._end(failed)

    async def _read(self) -> None:
        async for output in self._outputs:
            self._add(self.encoder.events(output))

    def _end(self, failed: Exception | None, status: str = "failed") -> None:
        """Mark the run as ended and wake all waiting clients, even if encoding the last events fails."""
        if self.is_over:
            return
        events: list[bytes] = []
        try:
            events = self._last_events(failed, status)
        finally:
            self.is_over = True
            self._add(events)
            self._on_end()

    def _last_events(self, failed: Exception | None, status: str) -> list[bytes]:
        if failed is None:
            try:
                return self.encoder.last_events()
            except Exception as error:
                logger.exception("could not encode the last events of a background response")
                failed = error
        return self.encoder.failed(failed, status)

    def _add(self, events: list[bytes]) -> None:
        if self.keeps_events:
            self.events += events
            self.num_bytes += sum(map(len, events))
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def cancel(self) -> None:
        """Cancel the run, unless it has ended, and wait for its end."""
        if self._task is None or self.is_over:
            return
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
            await self._outputs.aclose()
        finally:
            self._end(EngineError("the response was cancelled"), "cancelled")

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events after sequence number `after`, past and future."""
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
    """Wait forever: a background response does not depend on its client's connection."""
    await asyncio.Event().wait()
    raise AssertionError
