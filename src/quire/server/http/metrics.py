"""Metrics of every HTTP request and response."""

import time
from collections.abc import Callable

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.metrics.http import HANDLERS, UNCOUNTED, Exchange
from quire.server.http.limits import SendWrapper, route_path


class MetricsMiddleware:
    """ASGI middleware that passes route, status, seconds and body bytes of each HTTP request to `count`."""

    def __init__(self, app: ASGIApp, count: Callable[[Exchange], None]) -> None:
        self._app = app
        self._count = count
        self._patterns = [
            (path, Route(path, endpoint=_no_endpoint, methods=list(methods)))
            for path, methods in HANDLERS.items()
            if "{" in path
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in UNCOUNTED:
            return await self._app(scope, receive, send)
        started = time.perf_counter()
        answer = _RecordingSend(send)
        try:
            await self._app(scope, receive, answer)
        finally:
            self._count(
                Exchange(
                    handler=self._handler(scope),
                    method=scope["method"],
                    status=answer.status,
                    seconds=time.perf_counter() - started,
                    request_bytes=_length(scope["headers"]),
                    response_bytes=answer.num_bytes,
                )
            )

    def _handler(self, scope: Scope) -> str:
        if (path := route_path(scope)) in HANDLERS:
            return path
        return next((path for path, route in self._patterns if route.matches(scope)[0] is Match.FULL), "none")


class _RecordingSend(SendWrapper):
    """An ASGI `send` that records the status and the content length in bytes of the response."""

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self.status = 200
        self.num_bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.num_bytes = message["status"], _length(message.get("headers", ()))
        await self._send(message)


def _length(headers: list[tuple[bytes, bytes]]) -> int:
    text = next((value for name, value in headers if name.lower() == b"content-length"), b"")
    return int(text) if text.isdigit() and len(text) < 19 else 0


async def _no_endpoint() -> None:
    """Do nothing: the routes with this endpoint are used only to match paths."""
