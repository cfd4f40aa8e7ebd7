"""What the routes say of themselves: bodies, replies and errors, for the OpenAPI document."""

import json
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.direct import may_have_surrogates
from quire.server.replies import ErrorReply


async def _valid_text(request: Request) -> None:
    raw = await request.body()
    if b"\0" in raw[:4]:  # two or four bytes a character: `json` would read it, half surrogates and all
        raise RequestError("the body is not in UTF-8; send it so")
    if may_have_surrogates(raw):
        try:
            json.dumps(json.loads(raw), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(error.object[error.start]):04X}"
            raise RequestError(f"the body holds the lone surrogate {found}; remove it") from None


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
        text = {"schema": {"type": "string"}, "example": 'data: {"choices": []}\n\ndata: [DONE]\n\n'}
        described[200]["content"] = {"text/event-stream": text}
    described |= {code: {"model": error} for code in codes}
    return {"responses": described, "response_model": None} | (
        {"response_class": Response} if model is None else {}
    )


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
