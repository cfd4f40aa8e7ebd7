"""Errors of /v1/messages: whatever part of the server has found one, this API has its own words for it."""

import json
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """What any of the server's errors is here. Without a `status` it is the code in the body."""
    found = body.get("error", body.get("detail"))
    if isinstance(found, dict):
        status, found = found.get("code", status), found.get("message")
    kind = _KINDS.get(status or 500, "api_error" if (status or 500) >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(found)}}


class MessageErrors:
    """Rewrites the errors that `app` sends from the paths of this API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and scope["path"].endswith(PATHS)
        await self._app(scope, receive, _Rewritten(scope, receive, send) if ours else send)


class _Rewritten:
    """A way to the client on which errors are held until they can be put into other words."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.direct = getattr(send, "direct", send)
        """The way itself, for streams."""
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Message | None = None
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_error(message):
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            return await self._send(message)
        self._held += message.get("body", b"")
        if not message.get("more_body"):
            await self._rewrite(self._start)

    async def _rewrite(self, start: Message) -> None:
        status = start["status"]
        body = json.dumps(as_message_error(json.loads(self._held), status)).encode()
        response = Response(body, status, media_type="application/json")
        own = {name for name, _ in response.raw_headers}
        response.raw_headers += [each for each in start["headers"] if each[0].lower() not in own]
        await response(self._scope, self._receive, self._send)


def _is_error(start: Message) -> bool:
    return start["status"] >= 400 and (b"content-type", b"application/json") in start["headers"]
