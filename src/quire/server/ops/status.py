"""Status routes: models, health, version, load and metrics."""

import uuid
from typing import Any

from fastapi import FastAPI
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from quire.errors import EngineError
from quire.server.http.errors import error_info, error_response, json_response
from quire.server.http.openapi_document import replies_of
from quire.server.openai import replies
from quire.server.openai.replies import ErrorReply
from quire.server.openai.service import GenerationService, no_model


class AnyText(Convertor[str]):
    """Path parameter of any text; Starlette's `path` stops at a line end."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any", AnyText())


def add_model_routes(app: FastAPI, api: GenerationService) -> None:
    created = int(api.engine.facts.start_time)

    def card(name: str, root: str, parent: str | None = None) -> dict[str, Any]:
        permission = {
            "id": f"modelperm-{uuid.uuid5(uuid.NAMESPACE_URL, name).hex}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "quire",
            "root": root,
            "parent": parent,
            "max_model_len": api.engine.inputs.max_model_len,
            "permission": [permission],
        }

    def cards() -> dict[str, dict[str, Any]]:
        facts = api.engine.facts
        by_name = {name: card(name, facts.root) for name in facts.model_names}
        for adapter in api.adapters:
            by_name[adapter.name] = card(adapter.name, adapter.root, adapter.base or facts.model_names[0])
        return by_name

    @app.get("/v1/models", **replies_of(replies.ModelList, 503))
    async def list_models() -> Response:
        """List the names of the model and its adapters once the engine is ready. Clients poll this route at
        start-up."""
        api.engine.check()
        return json_response({"object": "list", "data": list(cards().values())})

    @app.get("/v1/models/{name:any}", **replies_of(replies.ModelCardReply, 404))
    async def show_model(name: str) -> Response:
        """Return one served model."""
        model = cards().get(name)
        if model is None:
            raise no_model(name)
        return json_response(model)


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
        try:
            api.engine.check()
        except EngineError as error:
            return error_response(error_info(str(error), 503, "ServiceUnavailableError"))
        return Response(status_code=200)

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
        return Response(api.engine.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")
