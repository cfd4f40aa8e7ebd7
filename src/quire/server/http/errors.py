"""Error responses: `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from quire.errors import EngineError, QuireError, RequestError, TooMany
from quire.logs import get_logger

logger = get_logger(__name__)

_MAX_SHOWN = 8
"""Maximum validation errors listed in one message."""
_MAX_PATH = 256
"""Maximum characters of the path to an invalid field."""


class ClientDisconnected(Exception):
    """Raised when the client disconnects before its request is answered."""


class NotFound(RequestError):
    """The requested object does not exist."""

    status = 404


class InvalidBody(RequestError):
    """The fields of the body contradict each other. The error type is that of a validation error in vLLM."""

    kind = "Bad Request"


class InvalidUserInput(RequestError):
    """An adapter cannot be loaded or unloaded as requested; the error type has vLLM's name."""

    kind = "InvalidUserInput"


class Forbidden(RequestError):
    """The client lacks the permission for the request."""

    status = 403


class TooLarge(RequestError):
    """The request exceeds a size limit."""

    status = 413


_KINDS = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "Content Too Large",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}
"""Error type of a client error by status; the default is BadRequestError."""


def error_info(message: str, status: int, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_body(error: Exception) -> dict[str, Any]:
    """Return the response body of any exception. Internal errors are not described to the client."""
    if isinstance(error, RequestError):
        kind = getattr(error, "kind", _KINDS.get(error.status, "BadRequestError"))
        return error_info(str(error), error.status, kind, error.param)
    if isinstance(error, EngineError):
        kind = "ServiceUnavailableError" if error.status == 503 else "InternalServerError"
        return error_info(str(error), error.status, kind)
    return error_info("internal error; the server's log says more", 500, "InternalServerError")


def as_request_error(error: ValidationError) -> RequestError:
    """Convert the validation error of a chat body that was translated from the body of another API."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(map(str, first["loc"]))[:_MAX_PATH]
    return RequestError(f"{path}: {first['msg']}", param=path)


def json_response(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def error_response(body: dict[str, Any]) -> Response:
    """Return an error response in ASCII, since a message may quote invalid Unicode."""
    return Response(json.dumps(body).encode(), body["error"]["code"], media_type="application/json")


def response_to(error: Exception, *, log_stack: bool = False) -> Response:
    """Return the response to a request that ended with an exception. `log_stack`: log the traceback of an
    EngineError."""
    if isinstance(error, ClientDisconnected):
        return Response(status_code=499)  # seen in access logs only
    if isinstance(error, HTTPException):
        return _http_error(error)
    if log_stack and isinstance(error, EngineError):
        logger.error("A request was answered with status %d", error.status, exc_info=error)
    response = error_response(error_body(error))
    if isinstance(error, TooMany):
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


def add_error_handlers(app: FastAPI, *, log_stack: bool) -> None:
    def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            return _list_errors(error.errors())
        if isinstance(error, HTTPException):
            return _http_error(error, _intended_route(request, app))
        return response_to(error, log_stack=log_stack)

    for kind in (QuireError, ClientDisconnected, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond)


def _intended_route(request: Request, app: FastAPI) -> str | None:
    """Return the route that a client probably meant, with one `/v1` or a final `s` added or removed."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    known = {getattr(route, "path", "") for route in app.routes}
    single = path.replace("/v1/v1/", "/v1/", 1)
    return next((name for name in (single, f"/v1{path}", f"{path}s", f"/v1{path}s") if name in known), None)


def validation_error(error: ValidationError) -> Response:
    """Return the response to an invalid body, in FastAPI's format."""
    errors = error.errors(include_url=False, include_input=False)
    return _list_errors([{**item, "loc": ("body", *item["loc"])} for item in errors])


def _keys(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields of pydantic's error `item` that the response shows. For invalid JSON,
    the field `ctx` has the reason."""
    return ("type", "loc", "msg", "ctx") if item["type"] == "json_invalid" else ("type", "loc", "msg")


def _list_errors(errors: Sequence[Any]) -> Response:
    shown = [{key: item[key] for key in _keys(item) if key in item} for item in errors[:_MAX_SHOWN]]
    more = [f"and {len(errors) - _MAX_SHOWN} more"] if len(errors) > _MAX_SHOWN else []
    head = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:"
    message = "\n  ".join([head, *map(str, shown), *more])
    param = ".".join(map(str, errors[0]["loc"])) if errors else None
    return error_response(error_info(message, 400, "Bad Request", param))


def _http_error(error: HTTPException, intended: str | None = None) -> Response:
    """Return the error in OpenAI's format. The error for an unknown route or method also has FastAPI's
    `detail`, and suggests the `intended` route if there is one."""
    status = error.status_code
    if status in (404, 405):  # no such route or method
        hint = f"; did you mean {intended}?" if status == 404 and intended is not None else ""
        text = f"{error.detail}{hint}"
        body = error_info(text, status, _KINDS.get(status, "Method Not Allowed"))
        return JSONResponse({"detail": text, **body}, status, error.headers)
    return error_response(error_info(str(error.detail), status, HTTPStatus(status).phrase))
