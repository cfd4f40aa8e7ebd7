"""Conversion of the server's errors to the format of /v1/messages."""

import json
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.limits import SendWrapper

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def as_message_error(body: dict[str, Any], status: int | None = None) -> dict[str, Any]:
    """Return an error body in Anthropic's format. The error type follows from the code in the body, or from
    `status` if the body has no code."""
    message = body.get("error", body.get("detail"))
    if isinstance(message, dict):
        status, message = message.get("code", status), message.get("message")
    kind = _KINDS.get(status or 500, "api_error" if (status or 500) >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(message)}}


class MessageErrorMiddleware:
    """ASGI middleware that rewrites the error replies of `app` on the paths of Anthropic's API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_message_path = scope["type"] == "http" and scope["path"].endswith(PATHS)
        await self._app(scope, receive, _RewritingSend(scope, receive, send) if is_message_path else send)


class _RewritingSend(SendWrapper):
    """An ASGI `send` that buffers error replies until they can be rewritten."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(send)
        self._scope, self._receive = scope, receive
        self._start: Message | None = None
        self._error_body = b""

    async def __call__(self, message: Message) -> None:
        is_error = message["type"] == "http.response.start" and message["status"] >= 400
        if is_error and (b"content-type", b"application/json") in message["headers"]:
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            return await self._send(message)
        self._error_body += message.get("body", b"")
        if not message.get("more_body"):
            await self._rewrite(self._start)

    async def _rewrite(self, start: Message) -> None:
        status = start["status"]
        body = json.dumps(as_message_error(json.loads(self._error_body), status)).encode()
        response = Response(body, status, media_type="application/json")
        names = {name for name, _ in response.raw_headers}
        response.raw_headers += [header for header in start["headers"] if header[0].lower() not in names]
        await response(self._scope, self._receive, self._send)
