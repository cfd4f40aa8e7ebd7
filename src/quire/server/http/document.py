"""What the routes say of themselves: bodies, replies and errors, for the OpenAPI document."""

from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from quire.server.http.fast_path import check_text
from quire.server.openai.replies import ErrorReply


async def _valid_text(request: Request) -> None:
    check_text(await request.body())


BODY: dict[str, Any] = {"dependencies": [Depends(_valid_text)]}
"""Of a route that takes one."""
CODES = (400, 404, 413, 422, 429, 500, 503)
"""With which a route that the engine works for may fail."""


def replies_of(
    model: type | None, *codes: int, stream: bool = False, error: type = ErrorReply
) -> dict[str, Any]:
    """The `responses` of a route's document, with those that every route may give. Without a model what goes
    well has no body."""
    done: dict[str, Any] = {"description": "Done.", "content": {}} if model is None else {"model": model}
    described: dict[int | str, dict[str, Any]] = {200: done}
    if stream:
        events = {"example": 'data: {"choices": []}\n\ndata: [DONE]\n\n'}
        described[200]["content"] = {"text/event-stream": events}
    for code in codes:
        first = code == codes[0]  # it brings the model, to which the others refer
        described[code] = {"model": error} if first else {"content": _referring(error)}
    return {"responses": described, "response_model": None} | (
        {"response_class": Response} if model is None else {}
    )


def _referring(model: type) -> dict[str, Any]:
    """What FastAPI makes of a model, without a validator for every route and code that nobody would ask."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with 400 in place of its 422: here that means an item that cannot be fetched."""
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
