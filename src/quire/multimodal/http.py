"""A minimal HTTP client: one GET over one connection to one address."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httptools

from quire.version import __version__

_PIECE_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16


Take = Callable[[int], Awaitable[None]]
"""Function that reserves this number of bytes for received data, and waits until they are free."""


class HttpAnswer(NamedTuple):
    """A complete HTTP response."""

    status: int
    headers: dict[str, str]
    """Headers by lower-case name."""
    body: bytes
    """Body of a response with status 200; empty for other statuses."""


async def get(
    address: str,
    port: int,
    *,
    host: str,
    netloc: str,
    path: str,
    tls: ssl.SSLContext | None,
    max_bytes: int,
    take: Take,
) -> HttpAnswer:
    """Send a GET request to the IP address `address`; `host` is the TLS server name, and `netloc` the Host
    header. `take` is called with the size of each received chunk. Raise an OverflowError as soon as the body
    is known to exceed `max_bytes`, and an OSError if the connection fails."""
    reader, writer = await asyncio.open_connection(
        address, port, ssl=tls, server_hostname=host if tls is not None else None
    )
    try:
        head = f"GET {path} HTTP/1.1\r\nHost: {netloc}\r\nUser-Agent: quire/{__version__}\r\n"
        head += "Accept: */*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
        writer.write(head.encode("ascii"))
        answer = _ResponseReader(max_bytes)
        while not answer.is_complete:
            piece = await reader.read(_PIECE_BYTES)
            if piece:
                await take(len(piece))
                answer.feed(piece)
            else:
                answer.end()
        return answer.result()
    finally:
        transport: Any = writer.transport
        transport.abort()


class _ResponseReader:
    """Reader of an HTTP response that arrives in chunks. The parser (httptools) calls the `on_` methods."""

    def __init__(self, max_bytes: int) -> None:
        self.is_complete = False
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._num_bytes = 0
        self._num_head = 0
        self._in_body = False

    def feed(self, piece: bytes) -> None:
        if not self._in_body:
            self._num_head += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            if not self.is_complete:  # bytes after the end are ignored
                raise ConnectionError(f"not an HTTP response: {error}") from None
        if not self._in_body and self._num_head > _MAX_HEAD_BYTES:
            raise ConnectionError("the headers of its response are too long")

    def end(self) -> None:
        """Handle the end of the connection. It completes a response without a stated length; any other
        response is incomplete, and a ConnectionError is raised."""
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if not self._in_body or framed:
            raise ConnectionError("the connection was closed before the response was complete")
        self.is_complete = True

    def result(self) -> HttpAnswer:
        return HttpAnswer(self._parser.get_status_code(), self._headers, b"".join(self._body))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim response
            return
        self._in_body = True
        if status != 200:
            self.is_complete = True
            return
        if self._headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            raise ConnectionError("its response is compressed, which was not requested")
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            raise OverflowError

    def on_body(self, data: bytes) -> None:
        if self.is_complete:
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise OverflowError
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._in_body:
            self.is_complete = True
        else:
            self._headers = {}
