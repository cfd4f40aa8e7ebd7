"""The outputs of several requests as one stream, and what else is done to streams of outputs."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from quire.data.outputs import RequestOutput
from quire.logs import get_logger
from quire.server.engine import Outputs, is_pushed

logger = get_logger(__name__)

PIECE_S = 0.005
"""How long a large call may hold the event loop in one go."""


class Pauses:
    """Lets the event loop turn between pieces of a large call. Several tasks of one call may share it: then
    one of them at a time goes on after a turn."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._resumed_at = clock()
        self._turns = asyncio.Lock()

    async def if_due(self) -> None:
        """Wait for a turn of the event loop if the call has held it for `PIECE_S`."""
        if self._clock() - self._resumed_at < PIECE_S:
            return
        async with self._turns:
            await asyncio.sleep(0)
            self._resumed_at = self._clock()


async def last_of_each(outputs: Outputs) -> dict[str, RequestOutput]:
    found = {}
    try:
        async for output in outputs:
            found[output.request_id] = output
    finally:
        await outputs.aclose()
    return found


class Logged:
    """Outputs that leave their text in the log when they are over."""

    def __init__(self, outputs: Outputs, name: str, cut: Callable[[str], str]) -> None:
        self._outputs, self._name, self._cut = outputs, name, cut
        self._texts: dict[tuple[str, int], list[str]] = {}

    def __aiter__(self) -> "Logged":
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._outputs.__anext__()
        for each in output.outputs:
            self._texts.setdefault((output.request_id, each.index), []).append(each.text)
        return output

    async def aclose(self) -> None:
        await self._outputs.aclose()
        while self._texts:
            _, texts = self._texts.popitem()
            logger.info("Generated response %s: %r", self._name, self._cut("".join(texts)))


class Merged:
    """Several requests as one stream of outputs, in the order in which they come, under these ids."""

    def __init__(self, started: Mapping[str, Outputs]) -> None:
        self._started = started
        self._arrived: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def __aiter__(self) -> "Merged":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._task is None:
            self._task = asyncio.create_task(self._queue())
        item = await self._arrived.get()
        if isinstance(item, RequestOutput):
            return item
        self._arrived.put_nowait(item)  # whoever asks again is told again
        raise StopAsyncIteration if item is None else item

    async def _queue(self) -> None:
        try:
            await self.forward(self._arrived.put_nowait)
        except Exception as error:  # handed to the reader, who raises it
            self._arrived.put_nowait(error)
        else:
            self._arrived.put_nowait(None)

    async def forward(
        self,
        reader: Callable[[RequestOutput], None],
        text_reader: Callable[[str, int], None] | None = None,
    ) -> None:
        """All outputs of all requests to `reader`, in the moment they come."""
        tasks, pause = list[asyncio.Task[None]](), Pauses()
        try:
            for id, outputs in self._started.items():
                tasks.append(asyncio.create_task(_forward(id, outputs, reader)))
                await pause.if_due()
            await asyncio.gather(*tasks)
        finally:
            while tasks:
                tasks.pop().cancel()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for outputs in self._started.values():
            await outputs.aclose()


class InOrder:
    """Several requests that run at once, read one behind the other. What the later ones have said already is
    there when it is their turn."""

    def __init__(self, started: Sequence[Outputs]) -> None:
        self._started = started
        self._waiting: deque[asyncio.Task[RequestOutput]] | None = None
        """For the next output of each that is not over."""

    def __aiter__(self) -> "InOrder":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._waiting is None:
            self._waiting = deque(asyncio.create_task(_next(each)) for each in self._started)
        if not self._waiting:
            raise StopAsyncIteration
        output = await self._waiting[0]
        if output.finished:
            self._waiting.popleft()
        else:
            place = len(self._started) - len(self._waiting)
            self._waiting[0] = asyncio.create_task(_next(self._started[place]))
        return output

    async def aclose(self) -> None:
        waiting = self._waiting or ()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for outputs in self._started:
            await outputs.aclose()


async def _next(outputs: Outputs) -> RequestOutput:
    return await outputs.__anext__()


async def _forward(id: str, outputs: Outputs, reader: Callable[[RequestOutput], None]) -> None:
    def named(output: RequestOutput) -> None:
        output.request_id = id
        reader(output)

    if is_pushed(outputs):
        return await outputs.forward(named)
    try:
        async for output in outputs:
            named(output)
    finally:
        await outputs.aclose()
