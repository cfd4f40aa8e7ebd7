"""CoreRelay: runs requests from other processes on the engine core of this machine, one stream each."""

import asyncio
from collections.abc import AsyncIterator, Callable

from quire.data.step_plan import StepOutput, split_by_owner
from quire.data.wire import Abort, Add, FromCore, Missing, Ready, StepDone, decode_to_core, encode
from quire.errors import EngineDead
from quire.frontend.core_client import CoreLink
from quire.frontend.engine_link import EngineLink
from quire.frontend.outputs import OutputProcessor


class _Stream:
    """The messages of the engine core about one request, which are buffered until they are read."""

    def __init__(self, sequence_ids: list[str]) -> None:
        self.open = set(sequence_ids)
        """Sequences that have not ended."""
        self.error: EngineDead | None = None
        self._unread: list[bytes] = []
        self._wake = asyncio.Event()

    def put(self, message: FromCore) -> None:
        if isinstance(message, StepDone):
            self.open -= message.output.finished.keys()
        elif isinstance(message, Missing):
            self.open.clear()
        self._unread.append(encode(message))
        self._wake.set()

    def drop(self, sequence_id: str) -> None:
        """Stop waiting for the end of an aborted sequence."""
        self.open.discard(sequence_id)
        self._wake.set()

    def fail(self, error: EngineDead) -> None:
        self.error = error
        self._wake.set()

    async def read(self) -> list[bytes]:
        """Wait for messages of the core and return all that have arrived; an empty list means that the
        request has ended."""
        while not self._unread and self.open:
            if self.error is not None:
                raise self.error
            self._wake.clear()
            await self._wake.wait()
        messages, self._unread = self._unread, []
        return messages


class _Distributor(OutputProcessor):
    """Output processor that splits each step output by request and puts the parts into the requests' streams,
    without detokenizing."""

    def __init__(self, streams: dict[str, _Stream]) -> None:
        super().__init__(None)
        self._streams = streams

    def add_step(self, step: StepOutput) -> None:
        for stream, part in split_by_owner(step, self._streams).items():
            stream.put(StepDone(part))


class CoreRelay:
    """Runs requests of other processes on one engine core. It passes on encoded messages and does not process
    outputs."""

    def __init__(
        self, address: str, token: str, *, health_timeout_s: float, on_end: Callable[[], object]
    ) -> None:
        """Create a relay to the core at `address`, which expects the secret `token`. `on_end` is called when
        the core has died."""
        self._streams: dict[str, _Stream] = {}
        """Streams by sequence id."""
        self.link = CoreLink(
            0, 0, address, name="the engine", token=token, outputs=_Distributor(self._streams), owner=self
        )
        self._health_timeout_s = health_timeout_s
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._on_end = on_end

    def start(self) -> None:
        self.link.start()

    def close(self) -> None:
        self.link.close()

    async def ready(self) -> Ready:
        """Wait until the core is ready; return its first message."""
        return await asyncio.shield(self._ready)

    def check(self) -> None:
        """Raise EngineDead unless the core is available and makes progress."""
        if (problem := self.link.problem(self._health_timeout_s)) is not None:
            raise EngineDead(problem)

    async def run(self, data: bytes) -> AsyncIterator[list[bytes]]:
        """Send an encoded `Add` message to the core, and yield the core's encoded messages about its request.
        Closing the iterator early aborts the request."""
        self.check()
        add = decode_to_core(data)
        assert isinstance(add, Add)
        ids = [request.id for request in add.all()]
        stream = _Stream(ids)
        self._streams |= dict.fromkeys(ids, stream)
        self.link.send(add)
        try:
            while messages := await stream.read():
                yield messages
        finally:
            self._remove(ids, stream)
            if stream.open and self.link.core is not None:
                self.link.send(Abort(list(stream.open)))

    def abort(self, sequence_ids: list[str]) -> None:
        """Send the core an Abort of some sequences of a request; its other sequences go on."""
        known = [id for id in sequence_ids if id in self._streams]
        if known and self.link.core is not None:
            self.link.send(Abort(known))
        for id in known:
            self._streams[id].drop(id)

    def _remove(self, ids: list[str], stream: _Stream) -> None:
        for id in ids:
            if self._streams.get(id) is stream:
                del self._streams[id]

    # ---- callbacks of the connection

    def on_ready(self, link: EngineLink) -> None:
        if not self._ready.done() and link.core is not None:
            self._ready.set_result(link.core)

    def on_missing(self, request_id: str) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.put(Missing(request_id))

    def on_stats(self, link: EngineLink, page: bytes | None) -> None: ...
    def on_reset(self) -> None: ...
    def on_outputs(self, link: EngineLink) -> None: ...

    def on_death(self, link: EngineLink) -> None:
        error = EngineDead(str(link.problem(0.0)))
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._on_end()
