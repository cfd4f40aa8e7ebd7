"""A local HTTP server that sends images, and misbehaves in every way a server can."""

import contextlib
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from fake_inputs import file_of, huge_png, picture

IMAGE = file_of(picture())
PATHS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "/image.png": (200, {}, IMAGE),
    "/page": (200, {"Content-Type": "text/html"}, b"<!doctype html><p>hello"),
    "/huge.png": (200, {}, huge_png()),
    "/near": (302, {"Location": "/image.png"}, b""),
    "/metadata": (302, {"Location": "http://169.254.169.254/latest/meta-data/"}, b""),
    "/elsewhere": (302, {"Location": "http://127.0.0.3/image.png"}, b""),
    "/etc": (302, {"Location": "file:///etc/passwd"}, b""),
    "/round": (302, {"Location": "/round"}, b""),
    "/nowhere": (302, {}, b""),
    "/unclosed": (302, {"Location": "http://[::1/x"}, b""),
    "/no-port": (302, {"Location": "http://127.0.0.1:port/x"}, b""),
    "/short": (200, {"Content-Length": str(len(IMAGE) + 100)}, IMAGE),
    "/claims": (200, {"Content-Length": str(1 << 40)}, IMAGE),
    "/packed": (200, {"Content-Encoding": "gzip"}, IMAGE),
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Host"]))
        if self.path == "/drips":
            self.send_response(200)
            self.end_headers()
            while not self.server.over.wait(0.05):
                self.wfile.write(b"x")
                self.wfile.flush()
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            while not self.server.over.is_set():
                self.wfile.write(bytes(1 << 16))
        elif self.path == "/chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(IMAGE), IMAGE))
        elif self.path == "/garbage":
            self.wfile.write(b"\x00\xff not http\r\n\r\n")
            self.close_connection = True
        elif self.path == "/flaky" and [path for path, _ in self.server.requests].count("/flaky") < 3:
            self._send(503, {}, b"busy")
        else:
            self._send(*PATHS.get(self.path, (200, {}, IMAGE) if self.path == "/flaky" else (404, {}, b"?")))

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: Any) -> None: ...

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has disconnected
            super().handle()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def hostile_server() -> Iterator[_Server]:
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
