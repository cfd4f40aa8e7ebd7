"""Requests with a JSON body: a valid body is parsed once and answered without FastAPI. FastAPI handles all
other requests and reports invalid bodies. Large bodies are parsed in a thread."""

import asyncio
import functools
import gc
import inspect
import json
import operator
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
from fastapi import FastAPI
from fastapi.params import Form
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.errors import QuireError, RequestError
from quire.logs import get_logger
from quire.server.http.errors import ClientDisconnected, response_to, validation_error
from quire.server.http.in_flight import HandlerQueue, is_disconnected
from quire.server.http.limits import account_of, route_path

logger = get_logger(__name__)

Respond = Callable[[Any, Request], Awaitable[Response]]
_MAX_BACKSLASHES, _MAX_FINDS = 64, 1024
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Pattern of a surrogate, escaped or encoded. A lone surrogate cannot be encoded in UTF-8."""
_LARGE = 1 << 20
"""Size in bytes above which a body is parsed in a thread."""
_MANY_BYTES, _MANY_VALUES = 1 << 14, 1 << 11
"""A body with more bytes and more values than these is parsed in a thread, too: parsing it takes about a
millisecond."""
_MAX_VALUES, _MAX_PARTS = 1 << 21, 1 << 18
"""Maximum values of a body, and maximum lists, objects and names. Parsing that many holds the GIL for half a
second: all other requests wait, even if a thread parses the body."""
_MAX_CONVERTED = 32
"""Maximum texts of numbers and booleans in a body."""
_INTEGER, _NUMBER = re.compile(r"[+-]?\d{1,19}", re.A), re.compile(r"[+-]?\d{1,19}(\.\d{1,19})?", re.A)
_PARTS = (b"[", b"{", b":")
"""Bytes that start a list, an object or the value of a name."""


class FastPath:
    """ASGI application that answers POSTs of JSON to the routes of `app`; other requests and invalid bodies
    go to `app`."""

    def __init__(self, app: FastAPI, *, log_stack: bool = False) -> None:
        self._app = app
        self._log_stack = log_stack
        self._routes: dict[str, tuple[TypeAdapter[Any], Respond]] = {
            route.path: (TypeAdapter(cast(Any, field.field_info.annotation)), _responder(route.endpoint))
            for route in app.routes
            if isinstance(route, APIRoute) and (field := route.body_field) is not None
            if not isinstance(field.field_info, Form)
        }
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        """A single thread, since parsing holds the GIL."""
        self._queue = HandlerQueue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(route_path(scope)) if scope.get("method") == "POST" else None
        if route is None:
            return await self._app(scope, receive, send)
        try:
            raw = await read_body(receive)
            account = account_of(scope)
            await self._queue.wait(0 if account is None else account.tenant)
            if is_disconnected(receive):
                raise ClientDisconnected
        except (HTTPException, ClientDisconnected) as error:  # HTTPException: the body is too long
            return await response_to(error)(scope, receive, send)
        adapter, respond = route
        request = Request(scope, receive)
        if _is_large(raw):
            response = await self._respond(partial(self._respond_large, adapter, respond), raw, request)
            return await response(scope, receive, send)
        if not may_have_surrogates(raw):
            try:
                body = parse_body(adapter, raw)
            except ValidationError:
                pass
            else:
                response = await self._respond(respond, body, request)
                return await response(scope, receive, send)
        await self._app(scope, replay(raw, receive), send)

    async def _respond_large(
        self, adapter: TypeAdapter[Any], respond: Respond, raw: bytes, request: Request
    ) -> Response:
        loop = asyncio.get_running_loop()
        try:
            body = await loop.run_in_executor(self._reader, _parse_large, adapter, raw)
        except ValidationError as error:
            return validation_error(error)
        return await respond(body, request)

    async def _respond(self, respond: Respond, body: Any, request: Request) -> Response:
        try:
            return await respond(body, request)
        except Exception as error:
            if not isinstance(error, QuireError | ClientDisconnected):
                logger.exception("A request failed with an internal error")
            return response_to(error, log_stack=self._log_stack)


def _responder(endpoint: Callable[..., Any]) -> Respond:
    """Return the endpoint as a function of body and request; some endpoints take only the body."""
    if len(inspect.signature(endpoint).parameters) > 1:
        return endpoint
    return lambda body, _: endpoint(body)


async def read_body(receive: Receive) -> bytes:
    """Return the whole body; raise ClientDisconnected if the client disconnects."""
    pieces, has_more = list[bytes](), True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnected
        pieces.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_large(raw: bytes) -> bool:
    """Whether parsing the body would block the event loop for milliseconds."""
    return len(raw) > _LARGE or (len(raw) > _MANY_BYTES and raw.count(b",") > _MANY_VALUES)


def _parse_large(adapter: TypeAdapter[Any], raw: bytes) -> Any:
    """Parse a large body; raise RequestError if it has too many values to parse quickly."""
    if _count(raw, b",") > _MAX_VALUES or sum(_count(raw, mark) for mark in _PARTS) > _MAX_PARTS:
        counts = _count_outside_strings(raw)
        for count, limit, kind in (
            (counts[ord(",")], _MAX_VALUES, "values"),
            (sum(counts[ord(mark)] for mark in _PARTS), _MAX_PARTS, "lists, objects and names"),
        ):
            if count > limit:
                raise RequestError(f"the body has {count} {kind}, and may have {limit}; send less at once")
    check_text(raw)
    gc.disable()  # a collection would scan all parsed objects repeatedly
    try:
        return parse_body(adapter, raw)
    finally:
        gc.enable()


def parse_body(adapter: TypeAdapter[Any], raw: bytes) -> Any:
    """Return the body; raise ValidationError if it is invalid. As in vLLM, the text of a number or of a
    boolean is accepted in its place, such as `"max_tokens": "16"`."""
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        converted = _convert_texts(raw, error)
        if converted is None:
            raise
        return adapter.validate_json(converted)


def _convert_texts(raw: bytes, error: ValidationError) -> bytes | None:
    """Return the body with the texts of numbers and booleans converted, or None if it has other errors."""
    if error.error_count() > _MAX_CONVERTED:
        return None
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    if any(item["type"] not in _CONVERSIONS for item in errors):
        return None
    try:
        body = json.loads(raw)
        for item in errors:
            *path, name = item["loc"]
            parent = functools.reduce(operator.getitem, path, body)
            parent[name] = _CONVERSIONS[item["type"]](parent[name])
    except (LookupError, TypeError, ValueError):
        return None
    return json.dumps(body).encode()


def _to_int(sent: Any) -> int:
    if not isinstance(sent, str) or not _INTEGER.fullmatch(sent):
        raise ValueError
    return int(sent)


def _to_float(sent: Any) -> float:
    if not isinstance(sent, str) or not _NUMBER.fullmatch(sent):
        raise ValueError
    return float(sent)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "int_type": _to_int,
    "float_type": _to_float,
    "bool_type": {"true": True, "false": False, "True": True, "False": False, 0: False, 1: True}.__getitem__,
}
"""Conversions of a value to the type that its field has, by the type of pydantic's error."""


def _count(raw: bytes, mark: bytes) -> int:
    """Count a byte in `raw`. For few occurrences in megabytes of base64, this is 30 times as fast as
    `bytes.count`."""
    position = -1
    for count in range(_MAX_FINDS):
        position = raw.find(mark, position + 1)
        if position < 0:
            return count
    return raw.count(mark)


def _count_outside_strings(raw: bytes) -> NDArray[np.int64]:
    """Return how often each byte occurs outside of JSON strings."""
    if b"\\" in raw:
        raw = raw.replace(rb"\\", b"__").replace(rb"\"", b"__")
    counts, inside = np.zeros(256, np.int64), 0
    for start in range(0, len(raw), _LARGE):
        piece = np.frombuffer(raw[start : start + _LARGE], np.uint8)
        is_inside = (np.cumsum(piece == ord('"'), dtype=np.uint8) + np.uint8(inside)) & 1
        counts += np.bincount(piece[is_inside == 0], minlength=256)
        inside = int(is_inside[-1])
    return counts


def replay(raw: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first yields the body that was already read."""
    was_replayed = False

    async def receive_replayed() -> Message:
        nonlocal was_replayed
        if was_replayed:
            return await receive()
        was_replayed = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return receive_replayed


def check_text(raw: bytes) -> None:
    """Raise RequestError if a body is not valid UTF-8 text."""
    if b"\0" in raw[:4]:  # UTF-16 or UTF-32, which `json` would accept, with lone surrogates
        raise RequestError("the body is not UTF-8; encode it as UTF-8")
    if may_have_surrogates(raw):
        try:
            json.dumps(json.loads(raw), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code_point = f"U+{ord(error.object[error.start]):04X}"
            raise RequestError(f"the body holds the lone surrogate {code_point}; remove it") from None
        except (ValueError, RecursionError):
            pass  # the parser reports invalid JSON


def may_have_surrogates(raw: bytes) -> bool:
    return (b"\xed" in raw or _has_escape(raw)) and _MAYBE_SURROGATE.search(raw) is not None


def _has_escape(raw: bytes) -> bool:
    """Whether the body has a \\u escape. Searching megabytes of base64 for one byte is thirty times as fast
    as for two, so the first backslashes are checked one by one."""
    position = -2
    for _ in range(_MAX_BACKSLASHES):
        position = raw.find(b"\\", position + 2)
        if position < 0 or raw[position + 1 : position + 2] == b"u":
            return position >= 0
    return b"\\u" in raw[position:]
