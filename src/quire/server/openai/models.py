"""/v1/models: the names of the model and its adapters."""

import uuid
from typing import Any

from fastapi import FastAPI
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import Response

from quire.server.http.errors import json_response
from quire.server.http.openapi_document import replies_of
from quire.server.openai import replies
from quire.server.openai.requested_model import unknown_model_error
from quire.server.openai.service import GenerationService


class AnyText(PathConvertor):
    """Path parameter of any text but the empty one; Starlette's `path` stops at a line end."""

    regex = "(?s:.+)"


register_url_convertor("any", AnyText())


def model_cards(api: GenerationService) -> dict[str, dict[str, Any]]:
    """Return the description of a model under each of its names, and of its adapters."""
    facts = api.engine.facts
    names = dict.fromkeys(facts.model_names, (facts.root, None))
    adapters = {
        adapter.name: (adapter.root, adapter.base or facts.model_names[0]) for adapter in api.adapters
    }
    return {name: _card(api, name, *root_and_parent) for name, root_and_parent in (names | adapters).items()}


def _card(api: GenerationService, name: str, root: str, parent: str | None) -> dict[str, Any]:
    created = int(api.engine.facts.start_time)
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


def add_model_routes(app: FastAPI, api: GenerationService) -> None:
    @app.get("/v1/models", **replies_of(replies.ModelList, 503))
    async def list_models() -> Response:
        """List the names of the model and its adapters once the engine is ready. Clients poll this route at
        start-up."""
        api.engine.check()
        return json_response({"object": "list", "data": list(model_cards(api).values())})

    @app.get("/v1/models/{name:any}", **replies_of(replies.ModelCardReply, 404))
    async def show_model(name: str) -> Response:
        """Return one served model."""
        model = model_cards(api).get(name)
        if model is None:
            raise unknown_model_error(name, api.names)
        return json_response(model)
