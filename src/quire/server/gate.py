"""What every HTTP request passes before the routes: the key, the size and type of its body. Decided once per
request; what is sent back goes through untouched."""

import hashlib
import hmac
from collections.abc import Iterable

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import error_info, error_response, json_response

DIRECT_SEND = "quire.send"
"""Where a scope holds the way to the connection, for responses that watch over their own errors."""
_NOT_JSON = "Unsupported Media Type: Only 'application/json' is allowed"


class Gate:
    """Lets in whoever has a key and brings a body that can be read."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Iterable[str],
        open_paths: frozenset[str],
        max_body_bytes: int,
        echo_request_id: bool,
    ) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._open_paths = open_paths
        self._max_body_bytes = max_body_bytes
        self._too_large = (
            f"the body is larger than {max_body_bytes} bytes; send less or raise --max-request-body-bytes"
        )
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if self._keys and not self._admitted(scope, headers):
            # A socket that is never accepted is closed by the server with 403.
            refused = json_response({"error": "Unauthorized"}, 401)
            return await refused(scope, receive, send) if scope["type"] == "http" else None
        if scope["type"] == "http" and scope["method"] == "POST":
            length, chunked = headers.get(b"content-length", b"0"), b"transfer-encoding" in headers
            if not self._fits(length):
                response = error_response(error_info(self._too_large, 413, "Content Too Large"))
                response.headers["connection"] = "close"
                return await response(scope, receive, send)
            if (chunked or length != b"0") and not _is_json(headers.get(b"content-type", b"")):
                response = error_response(error_info(_NOT_JSON, 400, "Bad Request"))
                return await response(scope, receive, send)
            if chunked:
                receive = self._counted(receive)
        if self._echo_request_id and b"x-request-id" in headers:
            send = _with_header(send, (b"x-request-id", headers[b"x-request-id"]))
        scope[DIRECT_SEND] = send
        await self._app(scope, receive, send)

    def _admitted(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._open_paths or scope.get("method") == "OPTIONS":
            return True
        given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        kind, _, key = given.partition(b" ")
        sent = _digest(key)
        # Every key is compared, whichever fits: the time taken says nothing.
        fits = [hmac.compare_digest(sent, known) for known in self._keys]
        return kind.lower() == b"bearer" and any(fits)

    def _fits(self, length: bytes) -> bool:
        return length.isdigit() and int(length[:20]) <= self._max_body_bytes

    def _counted(self, receive: Receive) -> Receive:
        """A body of unknown length is cut off as soon as it is too long."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counted


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _with_header(send: Send, header: tuple[bytes, bytes]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return sending
