"""What a server says of itself: its models, health, version, load and metrics."""

import uuid
from typing import Any

from fastapi import FastAPI
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from quire.errors import EngineError
from quire.server.http.document import replies_of
from quire.server.http.errors import error_info, error_response, json_response
from quire.server.openai import replies
from quire.server.openai.replies import ErrorReply
from quire.server.openai.service import GenerationService, no_model


class AnyText(Convertor[str]):
    """The rest of a path, whatever is in it: `path` of Starlette stops at the end of a line."""

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
        found = {name: card(name, facts.root) for name in facts.model_names}
        for each in api.adapters:
            found[each.name] = card(each.name, each.root, each.base or facts.model_names[0])
        return found

    @app.get("/v1/models", **replies_of(replies.ModelList, 503))
    async def list_models() -> Response:
        """Every name that the model and its adapters are served under, once it can be asked: clients wait for
        this answer."""
        api.engine.check()
        return json_response({"object": "list", "data": list(cards().values())})

    @app.get("/v1/models/{name:any}", **replies_of(replies.ModelCardReply, 404))
    async def show_model(name: str) -> Response:
        """One of the served names."""
        found = cards().get(name)
        if found is None:
            raise no_model(name)
        return json_response(found)


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

    # Probes of load balancers ask so. A server sends no body then, and the headers are the same.
    for path, answer in (("/health", health), ("/ping", health), ("/version", show_version)):
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @app.get("/load", **replies_of(replies.LoadReply))
    async def show_load() -> Response:
        """Requests being answered by this process."""
        return json_response({"server_load": api.engine.num_in_flight})

    text = {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", responses={200: text}, response_class=Response)
    async def metrics() -> Response:
        """Metrics over all processes, in Prometheus' format."""
        return Response(api.engine.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")
