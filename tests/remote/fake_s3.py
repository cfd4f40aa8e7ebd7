"""A small S3 server: listings, sizes and ranged reads of the objects in a dictionary."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class FakeS3:
    """One bucket with `objects`; other buckets do not exist."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.num_bytes_sent = 0
        self.url = ""

    def list_objects(self, prefix: str) -> bytes:
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{etag(data)}</ETag><Size>{len(data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, data in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        return (
            f"<ListBucketResult><Name>{self.bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        ).encode()


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _handler(store: FakeS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Print nothing."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            bucket, _, key = unquote(parts.path).strip("/").partition("/")
            if "Authorization" not in self.headers:
                return self.refuse(403, "AccessDenied")
            if bucket != store.bucket:
                return self.refuse(404, "NoSuchBucket")
            if not key:
                prefix = parse_qs(parts.query).get("prefix", [""])[0]
                return self.reply(200, store.list_objects(prefix))
            if key not in store.objects:
                return self.refuse(404, "NoSuchKey")
            data = store.objects[key]
            headers = {"ETag": etag(data), "Last-Modified": formatdate(0, usegmt=True)}
            if "Range" not in self.headers:
                return self.reply(200, data, headers)
            first, last = (int(text) for text in self.headers["Range"].removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            store.num_bytes_sent += len(part)
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
            return self.reply(206, part, headers)

        def refuse(self, status: int, code: str) -> None:
            self.reply(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

        def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


@contextmanager
def serve_s3(bucket: str) -> Iterator[FakeS3]:
    """Run the server in threads of this process."""
    store = FakeS3(bucket)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(store))
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
