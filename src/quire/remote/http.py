"""HTTP/1.1 client for asyncio with keep-alive connections. Chunks of streamed bodies go straight from the
socket to a callback, without a task switch."""

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from quire.errors import ConfigError, QuireError

CONNECT_TIMEOUT_S = 30.0
BUFFER_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}


class ServerGone(QuireError):
    """Raised if a server does not answer completely: it cannot be reached, the connection was lost, or it
    timed out."""


@dataclass(frozen=True, slots=True)
class Response:
    """A complete HTTP response: status code, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes
    """The body; empty if it was passed to `on_body`."""


class HttpClient:
    """HTTP client of one server. A connection is reused when its response is complete."""

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> None:
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in _PORTS or not parts.hostname or port == -1:
            raise ConfigError(f"{base_url!r} is not a server's address such as http://localhost:8000")
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.address = (parts.hostname, port or _PORTS[parts.scheme])
        self._prefix = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        lines = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._head = "".join(f"{name}: {_one_line(name, value)}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        on_body: Callable[[bytes], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request and return its response once it is complete. Chunks of a body with status 200 are
        passed to `on_body`, if given. Raise ServerGone if no complete response arrives."""
        message = self._message(method, path, body, headers or {})
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._exchange(message, on_body)
        except TimeoutError:
            raise ServerGone(f"{self.base_url} did not finish its answer in {self.timeout_s} s") from None
        except OSError as error:
            raise ServerGone(f"the connection to {self.base_url} was lost: {error}") from None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _message(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
        head += "".join(f"{name}: {_one_line(name, value)}\r\n" for name, value in headers.items())
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return (head + "\r\n").encode("latin-1") + (body or b"")

    async def _exchange(self, message: bytes, on_body: Callable[[bytes], None] | None) -> Response:
        while True:
            connection, used = self._take_idle(), True
            if connection is None:
                connection, used = await self._connect(), False
            try:
                response = await connection.exchange(message, on_body)
            except BaseException as error:
                connection.close()
                # The server may have closed an idle connection just when it was reused.
                if used and not connection.answered and isinstance(error, ConnectionError):
                    continue
                raise
            if not connection.closed:
                self._idle.append(connection)
            return response

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        host, port = self.address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(_Connection, host, port, ssl=self._tls)
        except TimeoutError:
            raise ServerGone(f"{self.base_url} did not connect in {CONNECT_TIMEOUT_S} s") from None
        except OSError as error:
            raise ServerGone(
                f"no server answers at {self.base_url} ({reason_of(error)}): is it running? "
                "start one with `quire serve`"
            ) from None
        return connection


class _Connection(asyncio.BufferedProtocol):
    """A connection with one request at a time. Its public methods, except `exchange` and `close`, are
    callbacks of asyncio and of the parser."""

    def __init__(self) -> None:
        self.closed = False
        self.answered = False
        """Whether any response data was received for the latest request on this connection."""
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Response] | None = None
        self._parser: Any = None
        self._sink: Callable[[bytes], None] | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._in_body = False
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    async def exchange(self, message: bytes, on_body: Callable[[bytes], None] | None) -> Response:
        assert self._transport is not None and self._waiter is None
        self._waiter = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._sink = on_body
        self._headers, self._body = {}, []
        self.answered = self._in_body = False
        self._transport.write(message)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        # A reused buffer: asyncio would allocate 256 KiB for every token.
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiter is None or self._waiter.done():
            self.close()
            return
        self.answered = True
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not an HTTP answer: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self._in_body and not framed and exc is None:
            self.on_message_complete()
        else:
            self._fail(ConnectionError(str(exc) if exc else "closed before the answer was complete"))

    def _fail(self, error: BaseException) -> None:
        self.closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._in_body = True
        is_streamed = self._sink is not None and self._parser.get_status_code() == 200
        self._on_body = self._sink if is_streamed else self._body.append

    def on_body(self, data: bytes) -> None:
        assert self._on_body is not None
        self._on_body(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # "100 Continue" precedes the response
            self._headers, self._in_body = {}, False
            return
        self._in_body = False
        self.closed = self.closed or not self._parser.should_keep_alive()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Response(status, self._headers, b"".join(self._body)))


def reason_of(error: OSError) -> str:
    """Return why a connection failed: the system's text for the errno, since asyncio's text repeats the
    address."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def _one_line(name: str, value: str) -> str:
    if "\r" in value or "\n" in value or not value.isascii():
        raise ConfigError(f"the value of the header {name} must be one line of ASCII")
    return value
