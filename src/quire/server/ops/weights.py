"""Routes for weight updates by a trainer, in developer mode only, with the names and bodies of vLLM."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from quire.data.control import DEFAULT_VERSION
from quire.errors import RequestError
from quire.server.http.errors import json_response
from quire.server.http.openapi_document import replies_of
from quire.server.openai.replies import reply_model
from quire.server.openai.service import GenerationService

_CODES = (400, 500, 503)


class InitTransferBody(BaseModel):
    """The body of /init_weight_transfer_engine: how to connect to the trainer. The fields of `init_info`
    depend on the backend of weight_transfer_config."""

    init_info: dict[str, Any]


class UpdateWeightsBody(BaseModel):
    """The body of /update_weights: which tensors the trainer sends. The fields of `update_info` depend on the
    backend of weight_transfer_config."""

    update_info: dict[str, Any]


class FinishUpdateBody(BaseModel):
    """The body of /finish_weight_update: the name of the version of the new weights."""

    weight_version: str | None = None


class WeightVersionBody(BaseModel):
    """The body of /update_weight_version: a version name for the current weights."""

    new_version: str


WeightUpdateReply = reply_model("WeightUpdateReply", "Result of a step of a weight update.", message=str)
VersionSetReply = reply_model("VersionSetReply", "The version that was set.", success=bool, new_version=str)
WeightInfoReply = reply_model(
    "WeightInfoReply", "Version of the weights; `default` at start.", weight_version=str
)


def version_header(operation: Any) -> str:
    """Return the value of the response header with the version of the weights; empty if no trainer is
    configured and the engine still has the weights that it started with."""
    has_trainer = operation.settings.get("extensions", {}).get("weight_transfer_config")
    version: str = operation.weight_version
    return version if has_trainer or version != DEFAULT_VERSION else ""


def add_weight_routes(app: FastAPI, api: GenerationService) -> None:

    @app.post("/init_weight_transfer_engine", **replies_of(WeightUpdateReply, *_CODES))
    async def init_weight_transfer_engine(body: InitTransferBody) -> Response:
        """Set up the transfer of weights from a trainer."""
        await api.engine.operation.init_weight_transfer_engine(body.init_info)
        return json_response({"message": "Weight transfer initialized"})

    @app.post("/start_weight_update", **replies_of(WeightUpdateReply, *_CODES))
    async def start_weight_update() -> Response:
        """Start a weight update. The engine serves its old weights until /finish_weight_update."""
        await api.engine.operation.start_weight_update()
        return json_response({"message": "Weight update started"})

    @app.post("/start_draft_weight_update", **replies_of(WeightUpdateReply, *_CODES))
    async def start_draft_weight_update() -> Response:
        """Refuse: the weights of draft models cannot be updated."""
        raise RequestError(
            "the weights of a draft model cannot be updated: restart the engine, or use ngram or suffix"
        )

    @app.post("/update_weights", **replies_of(WeightUpdateReply, *_CODES))
    async def update_weights(body: UpdateWeightsBody) -> Response:
        """Receive new weights. If a tensor does not fit the model, the whole update is dropped."""
        await api.engine.operation.update_weights(body.update_info)
        return json_response({"message": "Weights updated"})

    @app.post("/finish_weight_update", **replies_of(WeightUpdateReply, *_CODES))
    async def finish_weight_update(body: FinishUpdateBody | None = None) -> Response:
        """Apply the received weights between two steps, and drop cached prefixes of the old weights."""
        await api.engine.operation.finish_weight_update(None if body is None else body.weight_version)
        return json_response({"message": "Weight update finished"})

    @app.post("/update_weight_version", **replies_of(VersionSetReply, *_CODES))
    async def update_weight_version(body: WeightVersionBody) -> Response:
        """Set the version name of the current weights, which /weight_info returns."""
        await api.engine.operation.update_weight_version(body.new_version)
        return json_response({"success": True, "new_version": body.new_version})

    @app.get("/weight_info", **replies_of(WeightInfoReply, *_CODES))
    async def weight_info() -> Response:
        """Return the version of the weights."""
        return json_response({"weight_version": api.engine.operation.weight_version})
