"""The short way to the busy routes: a valid body is read once and answered; everything else goes the long
way, where FastAPI says what is wrong with it. Large bodies of any route are read beside the event loop."""

import asyncio
import gc
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.params import Form
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import QuireError, RequestError
from quire.logs import get_logger
from quire.server.http.errors import (
    describe,
    error_response,
    http_error,
    nobody,
    quire_error,
    validation_error,
)
from quire.server.http.in_flight import ClientGone

logger = get_logger(__name__)

Respond = Callable[[Any, Request], Awaitable[Response]]
_FEW, _SOME = 64, 1024
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Half of a surrogate pair is no character: nothing behind the API could encode it."""
_LARGE = 1 << 20
"""Bytes of a body that takes long to read."""
_MAX_VALUES, _MAX_PARTS = 1 << 21, 1 << 18
"""Of a body: values, and lists, objects and names among them. Reading as many holds up everybody for half a
second, wherever it is done: nobody else runs meanwhile."""
_PARTS = (b"[", b"{", b":")
"""What they come with."""


class Direct:
    """Answers POSTs to the paths that it knows; all others, and bodies it cannot read, are `app`'s."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Mapping[str, tuple[Any, Respond]],
        others: Mapping[str, tuple[Any, Respond]] | None = None,
        *,
        log_stack: bool = False,
    ) -> None:
        """`routes`: the model of a body, or several, and who answers it. `others`: whose bodies are read here
        only if they are large."""
        self._app = app
        self._log_stack = log_stack
        self._busy = frozenset(routes)
        self._routes: dict[str, tuple[TypeAdapter[Any], Respond]] = {
            path: (TypeAdapter(model), respond)
            for path, (model, respond) in {**(others or {}), **routes}.items()
        }
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        """One for all: each holds up the event loop while it reads."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is None:
            return await self._app(scope, receive, send)
        try:
            raw = await _whole(receive)
        except HTTPException as error:  # the body is too long
            return await http_error(error)(scope, receive, send)
        except ClientGone:
            return await nobody()(scope, receive, send)
        adapter, respond = route
        if len(raw) > _LARGE:
            response = await self._answered(self._beside(adapter, respond), raw, Request(scope, receive))
            return await response(scope, receive, send)
        if scope["path"] in self._busy and not may_have_surrogates(raw):
            try:
                body = adapter.validate_json(raw)
            except ValidationError:
                pass
            else:
                response = await self._answered(respond, body, Request(scope, receive))
                return await response(scope, receive, send)
        await self._app(scope, _again(raw, receive), send)

    def _beside(self, adapter: TypeAdapter[Any], respond: Respond) -> Respond:
        async def answered(raw: bytes, request: Request) -> Response:
            try:
                body = await asyncio.get_running_loop().run_in_executor(self._reader, _read, adapter, raw)
            except ValidationError as error:
                return validation_error(error)
            return await respond(body, request)

        return answered

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


def json_routes(app: FastAPI) -> dict[str, tuple[Any, Respond]]:
    """The routes that take JSON: what it must look like, and who answers it."""
    found: dict[str, tuple[Any, Respond]] = {}
    for route in app.routes:
        if not isinstance(route, APIRoute) or route.body_field is None:
            continue
        if not isinstance(route.body_field.field_info, Form):
            found[route.path] = route.body_field.field_info.annotation, _responder(route.endpoint)
    return found


def _responder(endpoint: Callable[..., Any]) -> Respond:
    """Some have no use for the request itself."""
    if len(inspect.signature(endpoint).parameters) > 1:
        return endpoint
    return lambda body, _: endpoint(body)


async def _whole(receive: Receive) -> bytes:
    """The body."""
    pieces, more = list[bytes](), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read(adapter: TypeAdapter[Any], raw: bytes) -> Any:
    """A large body, looked at for what would take long before that is done."""
    if _count(raw, b",") > _MAX_VALUES or sum(_count(raw, mark) for mark in _PARTS) > _MAX_PARTS:
        counts = _count_outside_strings(raw)
        for found, most, what in (
            (counts[ord(",")], _MAX_VALUES, "values"),
            (sum(counts[ord(mark)] for mark in _PARTS), _MAX_PARTS, "lists, objects and names"),
        ):
            if found > most:
                raise RequestError(f"the body has {found} {what}, and may have {most}; send less at once")
    check_text(raw)
    gc.disable()  # it would look at all that is read again and again
    try:
        return adapter.validate_json(raw)
    finally:
        gc.enable()


def _count(raw: bytes, mark: bytes) -> int:
    """As `bytes.count`, which takes 30 times as long where there are few of them in megabytes of base64."""
    at = -1
    for count in range(_SOME):
        at = raw.find(mark, at + 1)
        if at < 0:
            return count
    return raw.count(mark)


def _count_outside_strings(raw: bytes) -> NDArray[np.int64]:
    """How often each byte stands there."""
    if b"\\" in raw:
        raw = raw.replace(rb"\\", b"__").replace(rb"\"", b"__")
    counts, inside = np.zeros(256, np.int64), 0
    for start in range(0, len(raw), _LARGE):
        piece = np.frombuffer(raw[start : start + _LARGE], np.uint8)
        is_inside = (np.cumsum(piece == ord('"'), dtype=np.uint8) + np.uint8(inside)) & 1
        counts += np.bincount(piece[is_inside == 0], minlength=256)
        inside = int(is_inside[-1])
    return counts


def _again(raw: bytes, receive: Receive) -> Receive:
    """`receive`, with a body that was already taken from it."""
    taken = False

    async def receiving() -> Message:
        nonlocal taken
        if taken:
            return await receive()
        taken = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return receiving


def check_text(raw: bytes) -> None:
    """That a body is text."""
    if b"\0" in raw[:4]:  # two or four bytes a character: `json` would read it, half surrogates and all
        raise RequestError("the body is not in UTF-8; send it so")
    if may_have_surrogates(raw):
        try:
            json.dumps(json.loads(raw), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(error.object[error.start]):04X}"
            raise RequestError(f"the body holds the lone surrogate {found}; remove it") from None
        except (ValueError, RecursionError):
            pass  # whoever reads it says what it is


def may_have_surrogates(raw: bytes) -> bool:
    return (b"\xed" in raw or _has_escape(raw)) and _MAYBE_SURROGATE.search(raw) is not None


def _has_escape(raw: bytes) -> bool:
    """Whether some character is spelled by its number. One byte is found in megabytes of base64 thirty times
    as quickly as two are: backslashes are looked at one by one, unless they are many."""
    at = -2
    for _ in range(_FEW):
        at = raw.find(b"\\", at + 2)
        if at < 0 or raw[at + 1 : at + 2] == b"u":
            return at >= 0
    return b"\\u" in raw[at:]
