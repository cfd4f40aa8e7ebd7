"""Server-sent events, written directly to the connection, without a coroutine per chunk, response models or
middleware."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.errors import QuireError
from quire.frontend.output_stream import OutputBuffer, Outputs, Pushed, is_pushed
from quire.logs import get_logger
from quire.server.http.errors import ClientDisconnected, error_body
from quire.server.http.in_flight import RunningRequests
from quire.server.http.limits import DIRECT_SEND


class Connection:
    """An HTTP/1.1 connection on which the headers of a response were sent, and the body follows in chunks."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._write = cycle.transport.write

    @classmethod
    def of_send(cls, send: Send) -> "Connection | None":
        """Return the connection to which an ASGI `send` writes; None with HTTP/1.0, and in tests, where
        `send` belongs to no connection."""
        cycle = getattr(getattr(send, "direct", send), "__self__", None)
        known = isinstance(cycle, RequestResponseCycle) and cycle.response_started and cycle.chunked_encoding
        return cls(cycle) if known else None  # type: ignore[arg-type]

    @property
    def is_full(self) -> bool:
        """Whether the write buffer is full, because the client reads too slowly."""
        return self._cycle.flow.write_paused

    async def drained(self) -> None:
        await self._cycle.flow.drain()

    def write(self, body: bytes) -> None:
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(body), body))


logger = get_logger(__name__)

Encode = Callable[[RequestOutput], bytes]

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


def chunk_head(frame: dict[str, Any]) -> bytes:
    """Return the beginning of the event of a stream chunk, up to its first choice. `frame`: the fields of the
    chunk other than `choices`."""
    return event(frame).removesuffix(b"}\n\n") + b',"choices":['


def _one_line(encoded: bytes) -> bytes:
    for mark, escaped in _SEPARATORS:
        if mark in encoded:
            encoded = encoded.replace(mark, escaped)
    return encoded


class AnswerEncoder:
    """Base class of encoders, one for each API, which turn engine outputs into stream events or a body."""

    @property
    def text_only(self) -> bool:
        """Whether `encode_text` may encode outputs that have only new text and its number of tokens, without
        logprobs or token ids."""
        return False

    def encode(self, output: RequestOutput) -> bytes:
        raise NotImplementedError

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        """Return the events for `num_tokens` new tokens with this text, in the middle of a response with a
        single choice. The first and the last output of a response are passed to `encode`."""
        raise NotImplementedError

    def finish(self) -> bytes:
        """Return the encoded events that end a successful stream, by default `data: [DONE]`."""
        return DONE

    def fail(self, error: Exception) -> bytes:
        """Return the encoded events that end a stream after `error`."""
        return event(error_body(error)) + DONE

    def response_body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of a response that is not streamed, from the last output of each prompt."""
        raise NotImplementedError


class EventStream(Response):
    """Response that streams the outputs of a request as events. The encoder provides the last events, also
    after a failure."""

    def __init__(
        self,
        outputs: Outputs,
        *,
        encoder: AnswerEncoder,
        running_requests: RunningRequests,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        """Create a response. `on_output` is called with each output that is passed to `encode`, and not to
        `encode_text`."""
        self.outputs = outputs
        self.encoder = encoder
        self.encode = encoder.encode if on_output is None else _with_callback(on_output, encoder.encode)
        self.running_requests = running_requests
        self.background = None
        self.status_code = 200
        self.raw_headers = list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = scope.get(DIRECT_SEND, send)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = await self.running_requests.until_disconnect(receive, self._write(send))
        except ClientDisconnected:
            return
        except Exception as error:  # the status was sent: the error can only be an event
            if not isinstance(error, QuireError):
                logger.exception("A stream ended with an internal error")
            last = self.encoder.fail(error)
        finally:
            await self.outputs.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send) -> bytes:
        connection = Connection.of_send(send)
        if connection is not None and is_pushed(self.outputs):
            await StreamWriter(connection, self.encoder, self.encode).run(self.outputs)
        else:
            async for output in self.outputs:
                if chunk := self.encode(output):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        return self.encoder.finish()


class StreamWriter:
    """Writes outputs to a connection as soon as they arrive, and buffers them while the client reads too
    slowly."""

    def __init__(self, connection: Connection, encoder: AnswerEncoder, encode: Encode | None = None) -> None:
        """Create a writer. `encode`, if given, is called instead of `encoder.encode`."""
        self._connection = connection
        self._encoder, self._encode = encoder, encode or encoder.encode
        self._buffered: dict[str, OutputBuffer] = {}
        self._draining: asyncio.Task[None] | None = None
        """Task that writes the buffered outputs once the client reads again. Its error ends the stream."""
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
        if (buffered := self._buffered.get(output.request_id)) is not None:
            buffered.add(output)
        else:
            self._buffered[output.request_id] = OutputBuffer(output)

    async def _drain(self) -> None:
        await self._connection.drained()
        buffered, self._buffered = self._buffered, {}
        for outputs in buffered.values():
            self._write(outputs.joined())
        self._draining = None

    def _write(self, output: RequestOutput) -> None:
        if chunk := self._encode(output):
            self._connection.write(chunk)


def _with_callback(on_output: Callable[[RequestOutput], None], encode: Encode) -> Encode:
    def encode_and_call(output: RequestOutput) -> bytes:
        on_output(output)
        return encode(output)

    return encode_and_call
