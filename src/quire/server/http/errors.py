"""What went wrong, as the client reads it: `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from quire.errors import EngineError, QuireError, RequestError
from quire.logs import get_logger

logger = get_logger(__name__)

_MAX_SHOWN = 8
"""Validation errors that one message lists."""
_MAX_PLACE = 256
"""Characters of the path to what is wrong."""


class NotFound(RequestError):
    """The client asked for something that is not here."""

    status = 404


class InvalidBody(RequestError):
    """Fields that do not go together. To vLLM they are a part of how a body looks."""


class InvalidUserInput(RequestError):
    """The client asked for a change that cannot be made; vLLM calls it so."""


class Forbidden(RequestError):
    """The client may not have what it asked for."""

    status = 403


class TooLarge(RequestError):
    """The client sent more than is read."""

    status = 413


class TooMany(RequestError):
    """The client asked for more than there is room for now."""

    status = 429
    retry_after_s = 1


_KINDS = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "Content Too Large",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}
"""What a request that is wrong is called, where not BadRequestError."""


def error_info(message: str, status: int, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def describe(error: Exception) -> dict[str, Any]:
    """The body for an error, from wherever it comes. What the client did not cause is not told to it."""
    if isinstance(error, InvalidUserInput):
        return error_info(str(error), error.status, "InvalidUserInput", error.param)
    if isinstance(error, InvalidBody):
        return error_info(str(error), error.status, "Bad Request", error.param)
    if isinstance(error, RequestError):
        return error_info(str(error), error.status, _KINDS.get(error.status, "BadRequestError"), error.param)
    if isinstance(error, EngineError):
        kind = "ServiceUnavailableError" if error.status == 503 else "InternalServerError"
        return error_info(str(error), error.status, kind)
    return error_info("internal error; the server's log says more", 500, "InternalServerError")


def invalid(error: ValidationError) -> RequestError:
    """What is wrong with a body that was made of another."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))[:_MAX_PLACE]
    return RequestError(f"{place}: {first['msg']}", param=place)


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_response(body: dict[str, Any]) -> Response:
    """ASCII only: an error may quote what is no valid text."""
    return Response(json.dumps(body).encode(), body["error"]["code"], media_type="application/json")


def quire_error(error: QuireError, *, log_stack: bool) -> Response:
    """The answer to a request that cannot be had."""
    if log_stack and isinstance(error, EngineError):
        logger.error("answered with %d", error.status, exc_info=error)
    response = error_response(describe(error))
    if isinstance(error, TooMany):
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


def nobody() -> Response:
    """Nobody reads this; 499 is what access logs show for a client that hung up."""
    return Response(status_code=499)


def add_error_handlers(app: FastAPI, *, log_stack: bool) -> None:
    def known(_: Request, error: Exception) -> Response:
        assert isinstance(error, QuireError)
        return quire_error(error, log_stack=log_stack)

    handlers: dict[type[Exception], Callable[[Request, Exception], Response]] = {
        QuireError: known,
        RequestValidationError: _validation_error,
        HTTPException: lambda _, error: http_error(error),
        Exception: lambda _, error: error_response(describe(error)),
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _wrong(error.errors())


def validation_error(error: ValidationError) -> Response:
    """The answer to a body that is wrong, as FastAPI finds it."""
    found = error.errors(include_url=False, include_input=False)
    return _wrong([{**each, "loc": ("body", *each["loc"])} for each in found])


def _wrong(found: Sequence[Any]) -> Response:
    shown = [{key: each[key] for key in ("type", "loc", "msg") if key in each} for each in found[:_MAX_SHOWN]]
    more = [f"and {len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else []
    head = f"{len(found)} validation error{'s' if len(found) > 1 else ''}:"
    message = "\n  ".join([head, *map(str, shown), *more])
    param = ".".join(map(str, found[0]["loc"])) if found else None
    return error_response(error_info(message, 400, "Bad Request", param))


def http_error(error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    if status in (404, 405):  # no such route or method: as every FastAPI server says it
        return JSONResponse({"detail": error.detail}, status, error.headers)
    return error_response(error_info(str(error.detail), status, HTTPStatus(status).phrase))
