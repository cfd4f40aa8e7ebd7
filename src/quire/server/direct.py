"""The short way to the busy routes: a valid body is read once and answered; everything else goes the long
way, where FastAPI says what is wrong with it."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import QuireError
from quire.logs import get_logger
from quire.server.answering import ClientGone
from quire.server.errors import describe, error_response, http_error, nobody, quire_error

logger = get_logger(__name__)

Respond = Callable[[Any, Request], Awaitable[Response]]
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Half of a surrogate pair is no character: nothing behind the API could encode it."""


class Direct:
    """Answers POSTs to the paths that it knows; all others, and bodies it cannot read, are `app`'s."""

    def __init__(
        self, app: ASGIApp, routes: Mapping[str, tuple[Any, Respond]], *, log_stack: bool = False
    ) -> None:
        """`routes`: the model of a body, or several, and who answers it."""
        self._app = app
        self._log_stack = log_stack
        self._routes: dict[str, tuple[TypeAdapter[Any], Respond]] = {
            path: (TypeAdapter(model), respond) for path, (model, respond) in routes.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is None:
            return await self._app(scope, receive, send)
        try:
            first = await receive()
        except HTTPException as error:  # the body is too long
            return await http_error(error)(scope, receive, send)
        raw = first.get("body", b"")
        if first["type"] == "http.request" and not first.get("more_body") and not may_have_surrogates(raw):
            adapter, respond = route
            try:
                body = adapter.validate_json(raw)
            except ValidationError:
                pass
            else:
                response = await self._answered(respond, body, Request(scope, receive))
                return await response(scope, receive, send)
        await self._app(scope, _again(first, receive), send)

    async def _answered(self, respond: Respond, body: Any, request: Request) -> Response:
        try:
            return await respond(body, request)
        except ClientGone:
            return nobody()
        except QuireError as error:
            return quire_error(error, log_stack=self._log_stack)
        except Exception as error:
            logger.exception("a request failed")
            return error_response(describe(error))


def _again(first: Message, receive: Receive) -> Receive:
    """`receive`, with a message that was already taken from it."""
    taken = False

    async def receiving() -> Message:
        nonlocal taken
        if taken:
            return await receive()
        taken = True
        return first

    return receiving


def may_have_surrogates(raw: bytes) -> bool:
    """Megabytes of base64 have neither byte: what is quick to find is looked for first."""
    return (b"\\u" in raw or b"\xed" in raw) and _MAYBE_SURROGATE.search(raw) is not None
