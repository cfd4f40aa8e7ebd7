"""Direct writes to the connection of a streamed response, without a coroutine per chunk."""

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Connection:
    """An HTTP/1.1 connection with sent headers, ready for the chunks of a body."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._write = cycle.transport.write

    @classmethod
    def under(cls, send: Send) -> "Connection | None":
        """Return the connection of `send`, or None if it is unknown: with HTTP/1.0, and in tests."""
        cycle = getattr(getattr(send, "direct", send), "__self__", None)
        known = isinstance(cycle, RequestResponseCycle) and cycle.response_started and cycle.chunked_encoding
        return cls(cycle) if known else None  # type: ignore[arg-type]

    @property
    def is_full(self) -> bool:
        """Whether the write buffer is full, as the client reads too slowly."""
        return self._cycle.flow.write_paused

    async def drained(self) -> None:
        await self._cycle.flow.drain()

    def write(self, body: bytes) -> None:
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(body), body))
