"""The OpenAPI document and its routes: bodies, responses and errors."""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from quire.server.http.fast_path import check_text
from quire.server.openai.replies import ErrorReply

Service = TypeVar("Service")


async def _valid_text(request: Request) -> None:
    check_text(await request.body())


BODY: dict[str, Any] = {"dependencies": [Depends(_valid_text)]}
"""Route options of a route with a body: the body must be valid text."""
CODES = (400, 404, 413, 422, 429, 500, 503)
"""Error status codes of a route that uses the engine."""


def add_post(
    app: FastAPI,
    service: Service,
    path: str,
    answer: Callable[[Service, Any, Request], Awaitable[Response]],
    reply: Any,
    *,
    codes: tuple[int, ...] = CODES,
    stream: bool = False,
    error: type = ErrorReply,
    content: dict[str, Any] | None = None,
) -> None:
    """Add a route that answers a POST with `answer(service, body, request)`. The OpenAPI document shows the
    name, the docstring and the body type of `answer`, `reply` as the model of the response, and `codes` as
    the error statuses. `content`: further media types of the response."""
    described = replies_of(reply, *codes, stream=stream, error=error)
    if content is not None:
        described["responses"][200].setdefault("content", {}).update(content)
    endpoint, text = partial(answer, service), inspect.getdoc(answer)
    app.add_api_route(
        path, endpoint, methods=["POST"], name=answer.__name__, description=text, **described, **BODY
    )


def replies_of(
    model: type | None, *codes: int, stream: bool = False, error: type = ErrorReply
) -> dict[str, Any]:
    """Return the options of a route that document its responses. If `model` is None, the successful response
    has no body."""
    success: dict[str, Any] = {"description": "Done.", "content": {}} if model is None else {"model": model}
    described: dict[int | str, dict[str, Any]] = {200: success}
    if stream:
        events = {"example": 'data: {"choices": []}\n\ndata: [DONE]\n\n'}
        described[200]["content"] = {"text/event-stream": events}
    reference = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error.__name__}"}}}
    for code in codes:
        # The first code defines the model. The others refer to it, which saves a validator for each.
        described[code] = {"model": error} if code == codes[0] else {"content": reference}
    return {"responses": described, "response_model": None} | (
        {"response_class": Response} if model is None else {}
    )


def document(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document without status 422 for invalid bodies: this server answers them with
    400, and uses 422 for media that cannot be fetched."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
