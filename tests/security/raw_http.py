"""A server in a thread, and clients that send raw bytes to it."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import uvloop
from fake_engine import FakeEngine
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.http.sockets import bind
from quire.server.main import serve
from quire.server.settings import make_settings

PATIENCE_S = 60.0
"""Seconds after which a hanging test fails."""
KEY = "secret"
PROBE = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()


@dataclass
class Response:
    """A response of the server."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


class Client:
    """A connection to the server, for raw bytes."""

    def __init__(self, address: Any, source: str | None = None) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        if source is not None:
            self.socket.bind((source, 0))
        self.socket.connect(address)
        if family != socket.AF_UNIX:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes, unless the server has already closed the connection."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def read(self, *, has_body: bool = True) -> Response | None:
        """Read a response; None if the connection is closed."""
        try:
            first = self._file.readline()
        except ConnectionResetError:
            return None
        if not first:
            return None
        status, headers = int(first.split()[1]), dict[str, str]()
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        response = Response(status, headers)
        if not has_body or status == 100:
            return response
        if headers.get("transfer-encoding") == "chunked":
            while size := int(self._file.readline(), 16):
                response.body += self._file.read(size)
                self._file.readline()
            self._file.readline()
        else:
            response.body = self._file.read(int(headers.get("content-length", 0)))
        return response

    def read_all(self) -> list[Response]:
        """Read responses until the server closes the connection."""
        return list(iter(self.read, None))

    @property
    def is_closed(self) -> bool:
        """Wait for the next bytes and return whether there are none because the server has closed the
        connection."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True


@dataclass
class RawServer:
    """A real server, with an engine without a model."""

    engine: FakeEngine
    address: Any
    clients: list[Client] = field(default_factory=list)

    def connect(self, source: str | None = None) -> Client:
        """Open a connection, from the local address `source` if it is set."""
        self.clients.append(Client(self.address, source))
        return self.clients[-1]

    def ask(self, *pieces: bytes, num: int = 1) -> list[Response]:
        """Send `pieces` over a new connection, and return `num` responses."""
        with self.connect() as client:
            for piece in pieces:
                client.send(piece)
            return [response for _ in range(num) if (response := client.read()) is not None]


@contextlib.contextmanager
def raw_server(engine: FakeEngine | None = None, **settings: Any) -> Iterator[RawServer]:
    """Serve from a thread, with a key and on a free port unless `settings` override that."""
    made = make_settings({"host": "127.0.0.1", "port": 0, "api_key": [KEY], **settings})
    served = engine or FakeEngine()
    listening, up, stop = bind(made.http), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await serve(made, served, [listening], stop=stop, announce=False, on_serving=lambda _: up.set())

    thread = threading.Thread(target=uvloop.run, args=(run(),))
    thread.start()
    assert up.wait(PATIENCE_S)
    server = RawServer(served, listening.getsockname())
    try:
        yield server
    finally:
        for client in server.clients:
            client.close()
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


class SlowReader:
    """Middleware that delays every request with a body before it is read."""

    WAIT_S = 2.5

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "POST":
            await asyncio.sleep(self.WAIT_S)
        await self._app(scope, receive, send)
