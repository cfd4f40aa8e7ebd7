"""Server-sent events, written directly to the connection, without response models or middleware."""

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.errors import QuireError
from quire.frontend.output_stream import OutputBuffer, Outputs, Pushed, is_pushed
from quire.logs import get_logger
from quire.server.encoder import AnswerEncoder
from quire.server.http.connection import Connection
from quire.server.http.errors import describe
from quire.server.http.in_flight import Answering, ClientGone
from quire.server.http.limits import DIRECT_SEND

logger = get_logger(__name__)

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode
# Some clients treat these as line ends; JSON does not.
_SEPARATORS = [(mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029"]


def quote(text: str) -> bytes:
    """Return `text` as a JSON string without any kind of line separator."""
    quoted = _encode(text)
    return quoted if text.isascii() else _one_line(quoted)


def event(body: Any) -> bytes:
    return b"data: " + _one_line(_encode(body)) + b"\n\n"


def opening(frame: dict[str, Any]) -> bytes:
    """Return the beginning of a chunk's event, up to its first choice."""
    return event(frame).removesuffix(b"}\n\n") + b',"choices":['


def _one_line(encoded: bytes) -> bytes:
    for mark, escaped in _SEPARATORS:
        if mark in encoded:
            encoded = encoded.replace(mark, escaped)
    return encoded


def failure(error: Exception) -> bytes:
    """Return the last events of a failed stream of chunks."""
    return event(describe(error)) + DONE


class EventStream(Response):
    """Response that streams the outputs of a request as events; the encoder writes the end, even on
    failure."""

    def __init__(self, outputs: Outputs, *, encoder: AnswerEncoder, answering: Answering) -> None:
        self.outputs = outputs
        self.encoder = encoder
        self.answering = answering
        self.background = None
        self.status_code = 200
        self.raw_headers = list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = scope.get(DIRECT_SEND, send)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = await self.answering.until_gone(receive, self._write(send))
        except ClientGone:
            return
        except Exception as error:  # the status was sent: the error can only be an event
            if not isinstance(error, QuireError):
                logger.exception("a stream failed")
            last = self.encoder.fail(error)
        finally:
            await self.outputs.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send) -> bytes:
        connection = Connection.under(send)
        if connection is not None and is_pushed(self.outputs):
            await Pushing(connection, self.encoder).run(self.outputs)
        else:
            async for output in self.outputs:
                if chunk := self.encoder.encode(output):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        return self.encoder.finish()


class Pushing:
    """Writer of outputs as soon as they arrive. They are buffered while the client reads too slowly."""

    def __init__(self, connection: Connection, encoder: AnswerEncoder) -> None:
        self._connection = connection
        self._encoder = encoder
        self._held: dict[str, OutputBuffer] = {}
        self._draining: asyncio.Task[None] | None = None
        """Task that writes the buffered outputs once the client reads again. If it fails, the stream ends."""
        self._last_id = ""

    async def run(self, outputs: Pushed) -> None:
        try:
            await outputs.forward(self._put, self._put_text if self._encoder.text_only else None)
            if self._draining is not None:
                await self._draining
        finally:
            if self._draining is not None:
                self._draining.cancel()

    def _put_text(self, text: str, num_tokens: int) -> None:
        if self._draining is not None or self._connection.is_full:
            output = CompletionOutput(0, text, range(num_tokens), None, None)
            self._put(RequestOutput(self._last_id, None, None, None, [output], finished=False))
        elif chunk := self._encoder.encode_text(text, num_tokens):
            self._connection.write(chunk)

    def _put(self, output: RequestOutput) -> None:
        self._last_id = output.request_id
        if self._draining is None and not self._connection.is_full:
            self._write(output)
            return
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        elif self._draining.done():
            self._draining.result()  # raises the encoder's error
        if (held := self._held.get(output.request_id)) is not None:
            held.add(output)
        else:
            self._held[output.request_id] = OutputBuffer(output)

    async def _drain(self) -> None:
        await self._connection.drained()
        held, self._held = self._held, {}
        for outputs in held.values():
            self._write(outputs.joined())
        self._draining = None

    def _write(self, output: RequestOutput) -> None:
        if chunk := self._encoder.encode(output):
            self._connection.write(chunk)
