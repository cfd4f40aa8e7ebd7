"""HTTP/1.1 on one connection: uvicorn's protocol with limits on the size and the time of requests.

uvicorn parses with httptools, which limits neither headers nor time. Here bytes are counted before they are
parsed, and requests that two parsers could read differently are refused. A connection is read for as long as
one of its requests runs, since a disconnect is noticed only by reading.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.config.server_sections import HttpSection
from quire.server.http.errors import error_info
from quire.server.http.refusals import OpenConnections, RefusalLog, network_of

MAX_PIPELINED = 16
"""Maximum pipelined requests that wait for the running request."""
MAX_PIPELINED_BYTES = 256 << 10
"""Maximum unparsed bytes of pipelined requests."""
LINGER_S = 2.0
"""Seconds from an error response to the close of its connection. If the connection were closed while the
client still sends, the client would lose the response."""
_SINGLE_HEADERS = frozenset(
    (b"authorization", b"x-api-key", b"host", b"content-type", b"content-length", b"transfer-encoding")
)
"""Headers that may occur once. With two, a proxy may use one of them and this server the other."""
_INVALID = (400, "the request is not valid HTTP/1.1; the connection is closed")
_IS_TLS = (400, "the client speaks TLS; this server speaks http://, so use that in its URL")
_TLS_HANDSHAKE = b"\x16"
"""First byte of a TLS connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of one connection: size and number of headers, seconds to receive headers and body bytes."""

    max_header_bytes: int
    max_headers: int
    header_timeout_s: float
    body_timeout_s: float

    @classmethod
    def of(cls, http: HttpSection) -> "HttpLimits":
        return cls(
            max_header_bytes=http.h11_max_incomplete_event_size,
            max_headers=http.h11_max_header_count,
            header_timeout_s=http.request_header_timeout,
            body_timeout_s=http.request_body_timeout,
        )


class HttpProtocol(HttpToolsProtocol):
    """HTTP protocol of one connection. `settings` are the arguments of uvicorn's protocol."""

    __slots__ = (  # next to uvicorn's instance dict, which is faster with at most 30 entries
        *("_answered_early", "_earlier_requests", "_is_ended", "_limits", "_max_bytes", "_max_headers"),
        *("_network", "_num_unparsed", "_on_closed", "_open_connections", "_pipelined", "_refusals"),
        *("_stop_reason", "_timer", "_waiting_since", "_was_paused"),
    )

    def __init__(
        self,
        *,
        limits: HttpLimits,
        open_connections: OpenConnections,
        refusals: RefusalLog,
        on_closed: Callable[[], object] = lambda: None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._limits = limits
        self._max_bytes = limits.max_header_bytes
        self._max_headers = limits.max_headers
        self._open_connections = open_connections
        self._refusals = refusals
        self._on_closed = on_closed
        self._network: str | None = None
        """IPv4 address or IPv6 network for which this connection is counted; None if it was refused."""
        self._earlier_requests: deque[RequestResponseCycle] = deque()
        """Pipelined requests without a complete response that came before `cycle`, the latest request. The
        first of them is the running request."""
        self._pipelined = bytearray()
        """Bytes of later requests, received while a complete request is still running."""
        self._is_ended = False
        """Whether all further input is discarded."""
        self._num_unparsed = 0
        """Number of bytes received since the end of the last headers or message, or the last chunk of a
        body."""
        self._waiting_since = 0.0
        """Event loop time in seconds at which the headers began, or the last bytes of a body arrived."""
        self._was_paused = False
        """Whether reading was paused for some time since `_waiting_since`."""
        self._timer: asyncio.TimerHandle | None = None
        self._stop_reason: tuple[int, str] | None = None
        """HTTP status and message of the error for which a callback has stopped the parser."""
        self._answered_early: RequestResponseCycle | None = None
        """Request that had its complete response, but not its whole body, at the last call of
        `_check_progress`."""

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        network = network_of(self.client[0] if self.client else "")
        if problem := self._open_connections.problem(network):
            self._count_refusal(problem)
            self._end_input()
            transport.write(self._error(503, problem))
            transport.close()
            return
        self._network = network
        self._open_connections.add(network)
        self._waiting_since = self.loop.time()
        self._timer = self.loop.call_later(self._limits.header_timeout_s, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disconnect()
        self._end_input()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._network is not None:
            self._open_connections.remove(self._network)
        self._on_closed()

    def data_received(self, data: bytes | memoryview) -> None:
        cycle = self.cycle
        if self._is_ended or (cycle is not None and not cycle.response_complete and self._is_answering()):
            self._buffer_pipelined(data)
            return
        self._unset_keepalive_if_required()
        num_unparsed = self._num_unparsed
        if not num_unparsed or cycle is not None and cycle.more_body:
            self._waiting_since = self.loop.time()
        num_unparsed += len(data)
        if num_unparsed > self._max_bytes:
            self._parse_in_pieces(memoryview(data))
            return
        self._num_unparsed = num_unparsed
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as stop:
            self._on_stop(stop, data)

    def _is_answering(self) -> bool:
        """Whether received bytes follow a complete request that has no complete response yet."""
        cycle = self.cycle
        return (
            cycle is not None
            and not cycle.response_complete
            and (not cycle.more_body or bool(self._earlier_requests))
        )

    def _in_body(self) -> bool:
        """Whether the headers are complete and the body is not."""
        return self.cycle is not None and self.cycle.more_body

    def _parse_in_pieces(self, data: memoryview) -> None:
        """Feed the parser in pieces. Refuse the request with status 431 if `_max_bytes` bytes contain neither
        the end of the headers or of the message nor a chunk of the body."""
        while data:
            if self._is_ended or self._is_answering():
                self._buffer_pipelined(data)
                return
            num_allowed = self._max_bytes - self._num_unparsed
            if num_allowed <= 0:
                self._refuse(
                    431,
                    f"the headers or trailers are larger than {self._max_bytes} bytes; send less or raise "
                    "--h11-max-incomplete-event-size",
                )
                return
            piece, data = data[:num_allowed], data[num_allowed:]
            self._num_unparsed += len(piece)
            try:
                self.parser.feed_data(piece)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as stop:
                self._on_stop(stop, piece)

    def _on_stop(self, stop: Exception, data: bytes | memoryview) -> None:
        """Handle an exception of the parser. An upgrade request also stops the parser: then parse the rest of
        `data`. Otherwise the input is invalid, and the request is refused."""
        if not isinstance(stop, httptools.HttpParserUpgrade):
            invalid = _IS_TLS if data[:1] == _TLS_HANDSHAKE else _INVALID
            self._refuse(*(self._stop_reason or invalid))
        elif rest := data[stop.args[0] :]:
            # The parser stops after the headers. There is no body, so the next request begins here.
            self.data_received(rest)

    def _buffer_pipelined(self, data: bytes | memoryview) -> None:
        """Keep pipelined requests until the earlier ones are answered. The connection is read meanwhile,
        since a disconnect would not be noticed otherwise."""
        if self._is_ended:
            return
        self._pipelined += data
        self.cycle.on_response = self._on_pipelined_response
        if len(self._pipelined) > MAX_PIPELINED_BYTES:
            self._close_after_responses()

    def _on_pipelined_response(self) -> None:
        """Continue with the next request after a response is complete."""
        if self._earlier_requests:
            self._earlier_requests.popleft()
        self.on_response_complete()
        if self._pipelined and not self._is_answering() and not self.transport.is_closing():
            pipelined, self._pipelined = bytes(self._pipelined), bytearray()
            self.data_received(pipelined)

    # ---- callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        previous, headers = self.cycle, dict(self.headers)
        if len(headers) != len(self.headers):
            self._check_repeated()
        if len(headers) > self._max_headers:
            self._stop_at_count()
        if b"transfer-encoding" in headers:
            self._check_coding(headers[b"transfer-encoding"])
            self.headers = []  # for the trailers; the request keeps its headers in the old list
        if b"expect" in headers:
            self.expect_100_continue = headers[b"expect"].lower() == b"100-continue"
        if self.parser.should_upgrade():
            self._check_upgrade(headers)
        is_pipelined = previous is not None and not previous.response_complete
        if is_pipelined and len(self._earlier_requests) >= MAX_PIPELINED:
            self._stop_parser(400, f"more than {MAX_PIPELINED} pipelined requests wait; send fewer")
        super().on_headers_complete()
        self._num_unparsed = 0
        if is_pipelined:
            self._earlier_requests.append(previous)
            previous.on_response = self._on_pipelined_response
            self.flow.resume_reading()  # which uvicorn has paused

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT and not self._earlier_requests:
            self._was_paused = True
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        self.cycle.more_body = False
        self.cycle.message_event.set()

    # ---- requests that are refused

    def _check_repeated(self) -> None:
        if len(self.headers) > self._max_headers:
            self._stop_at_count()
        names = [name for name, _ in self.headers]
        for name in sorted(_SINGLE_HEADERS.intersection(names)):
            if names.count(name) > 1:
                self._stop_parser(400, f"the request has more than one {name.decode()} header; send one")

    def _stop_at_count(self) -> NoReturn:
        self._stop_parser(
            431,
            f"the request has more than {self._max_headers} headers; send fewer or raise "
            "--h11-max-header-count",
        )

    def _check_coding(self, coding: bytes) -> None:
        if coding.strip().lower() != b"chunked":
            self._stop_parser(400, "the Transfer-Encoding of a body may be chunked only; send it so")
        if self.parser.get_http_version() != "1.1":
            self._stop_parser(400, "HTTP/1.0 has no chunked bodies; send a Content-Length or use HTTP/1.1")

    def _check_upgrade(self, headers: dict[bytes, bytes]) -> None:
        """Refuse an upgrade request with a body, which the parser would read as another request. Without a
        body the Upgrade header is ignored."""
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            self._stop_parser(
                400,
                "a request with a body cannot ask for an upgrade of the protocol; send it without Upgrade",
            )

    def _stop_parser(self, status: int, message: str) -> NoReturn:
        """Stop the parser from one of its callbacks, so that the request is refused with this error."""
        self._stop_reason = status, message
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answer the request that is being received with an error, and close the connection. If earlier
        responses are pending, or the response to this request has begun, complete these responses instead
        of sending the error, and close the connection after them."""
        self._count_refusal(message)
        if self._is_answering() or (self._in_body() and self.cycle.response_started):
            self._close_after_responses()
            return
        self._disconnect()
        self._end_input()
        self.transport.write(self._error(status, message))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._set_timer(self.loop.call_later(LINGER_S, self.transport.close))
        else:
            self.transport.close()

    def _close_after_responses(self) -> None:
        """Answer the complete requests, discard the rest of the input, and close."""
        self._end_input()
        last = self.cycle
        if self._earlier_requests and last.more_body:  # the last request will never be complete
            self.pipeline.popleft()
            last = self._earlier_requests[-1]
        last.keep_alive = False
        self.flow.resume_reading()
        if last.response_complete:
            self.transport.close()

    def _end_input(self) -> None:
        self._is_ended = True
        self._pipelined.clear()

    def _disconnect(self) -> None:
        """Mark all requests of this connection as disconnected; uvicorn does so for the last one only."""
        for cycle in (*self._earlier_requests, *([self.cycle] if self.cycle is not None else [])):
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self.pipeline.clear()

    def _count_refusal(self, cause: str) -> None:
        self._refusals.count(cause, self.client[0] if self.client else "Unix socket")

    def _error(self, status: int, message: str) -> bytes:
        kind = "ServiceUnavailableError" if status == 503 else HTTPStatus(status).phrase
        body = json.dumps(error_info(message, status, kind)).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = [b"%b: %b\r\n" % header for header in headers]
        return b"".join([STATUS_LINE[status], *lines, b"\r\n", body])

    # ---- time

    def _set_timer(self, timer: asyncio.TimerHandle) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _check_progress(self) -> None:
        """Refuse the request or close the connection if the client exceeds a time limit, and schedule the
        next check. Each connection has a single timer; arriving data only set `_waiting_since`."""
        in_body = self._in_body()
        limit_s = self._limits.body_timeout_s if in_body else self._limits.header_timeout_s
        if not self._awaits_client():
            self._waiting_since = self.loop.time()
        elif in_body and self.cycle.response_complete:
            # The rest of a body that is no longer read may take one more interval.
            if self._answered_early is self.cycle:
                self.transport.close()
                return
            self._answered_early, self._waiting_since = self.cycle, self.loop.time()
        elif self.loop.time() - self._waiting_since >= limit_s:
            self._time_out(in_body)
            return
        self._set_timer(self.loop.call_at(self._waiting_since + limit_s, self._check_progress))

    def _awaits_client(self) -> bool:
        """Whether the server waits for data of the client, and has not paused reading since the last check.
        The server does not wait while it answers a complete request or keeps an idle connection alive."""
        was_paused, self._was_paused = self._was_paused, self.flow.read_paused
        if self._is_ended or self.timeout_keep_alive_task is not None or was_paused or self._is_answering():
            return False
        return not (self._in_body() and self.cycle.waiting_for_100_continue)

    def _time_out(self, in_body: bool) -> None:
        if in_body:
            limit_s = self._limits.body_timeout_s
            cause = f"no byte of the body came for {limit_s:g} s, the limit of --request-body-timeout"
        elif self._num_unparsed:
            limit_s = self._limits.header_timeout_s
            cause = f"the headers did not end within {limit_s:g} s, the limit of --request-header-timeout"
        else:  # nothing was sent at all
            self.transport.close()
            return
        self._refuse(408, f"{cause}; send the request without a pause, or raise the limit")
