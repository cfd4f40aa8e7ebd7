"""Transports of batch requests: HTTP to a server, or ASGI calls to an application in this process."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from quire.remote.http import HttpClient

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Response to one request of a batch: its HTTP status and body."""

    status: int
    body: bytes


class Transport(Protocol):
    """Interface of the transports, which send requests to a server or to an application in this process."""

    async def send(self, url: str, body: bytes, request_id: str) -> BatchAnswer:
        """Post the JSON `body` to `url` and return the response. Raise ServerGone if the server sends
        none."""


class HttpTransport:
    """Sends requests to a running server."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def send(self, url: str, body: bytes, request_id: str) -> BatchAnswer:
        response = await self._client.request("POST", url, body, headers={"X-Request-Id": request_id})
        return BatchAnswer(response.status, response.body)


class AsgiTransport:
    """Calls an ASGI application in this process, without a socket. Requests are validated as by a server."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def send(self, url: str, body: bytes, request_id: str) -> BatchAnswer:
        unread = [body]
        status, parts = 500, []

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()  # the client never disconnects
            raise AssertionError

        async def collect(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(self._scope(url, body, request_id), receive, collect)
        return BatchAnswer(status, b"".join(parts))

    def _scope(self, url: str, body: bytes, request_id: str) -> Message:
        headers = [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "server": ("localhost", 80),
            "state": {},
        }
