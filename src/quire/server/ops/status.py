"""Status routes: health, version, load and metrics."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from quire.errors import EngineError
from quire.server.http.errors import error_info, error_response, json_response
from quire.server.http.openapi_document import replies_of
from quire.server.openai import replies
from quire.server.openai.replies import ErrorReply
from quire.server.openai.service import GenerationService

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of Prometheus' text format."""


def health_response(check: Callable[[], None]) -> Response:
    """Return a response without a body, with status 200, or status 503 and the cause if `check` fails."""
    try:
        check()
    except EngineError as error:
        return error_response(error_info(str(error), 503, "ServiceUnavailableError"))
    return Response(status_code=200)


def add_status_routes(app: FastAPI, api: GenerationService) -> None:
    healthy: dict[str, Any] = {
        "responses": {
            200: {"description": "The engine makes progress.", "content": {}},
            503: {"model": ErrorReply},
        },
        "response_class": Response,
    }

    async def health() -> Response:
        """Whether the engine makes progress: 200 without a body, or 503 with the cause."""
        return health_response(api.engine.check)

    app.add_api_route("/health", health, methods=["GET"], **healthy)
    app.add_api_route("/ping", health, methods=["GET"], operation_id="ping", **healthy)
    app.add_api_route("/ping", health, methods=["POST"], operation_id="ping_post", **healthy)

    @app.get("/version", **replies_of(replies.VersionReply))
    async def show_version() -> Response:
        return json_response({"version": api.engine.facts.version})

    # Load balancers probe with HEAD. The server then sends the same headers and no body.
    for path, answer in (("/health", health), ("/ping", health), ("/version", show_version)):
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @app.get("/load", **replies_of(replies.LoadReply))
    async def show_load() -> Response:
        """Return the number of running requests of this process."""
        return json_response({"server_load": api.engine.num_in_flight})

    text = {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", responses={200: text}, response_class=Response)
    async def metrics() -> Response:
        """Return the metrics of all processes, in Prometheus' format."""
        return Response(api.engine.metrics_text(), media_type=METRICS_TYPE)
