"""Routes /v1/load_lora_adapter and /v1/unload_lora_adapter; they need VLLM_ALLOW_RUNTIME_LORA_UPDATING."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

from quire.logs import get_logger
from quire.server.http.errors import InvalidUserInput, NotFound
from quire.server.http.openapi_document import BODY, replies_of
from quire.server.openai.requests import Body
from quire.server.openai.service import GenerationService

logger = get_logger(__name__)

_TEXT = {"description": "Done.", "content": {"text/plain": {"schema": {"type": "string"}}}}


class LoadAdapterBody(Body):
    """The body of /v1/load_lora_adapter."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool | None = False


class UnloadAdapterBody(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str | None = None
    lora_int_id: int | None = None


def _refuse() -> None:
    raise NotFound(
        "Adapters cannot be loaded or unloaded over HTTP: start the server with --enable-lora and with "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, or name them in --lora-modules."
    )


def add_adapter_routes(app: FastAPI, api: GenerationService) -> None:
    """Add the routes. Without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 they answer 404 and name this variable."""
    if not api.settings.changes_adapters:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            app.add_api_route(path, _refuse, methods=["POST"], include_in_schema=False)
        return
    clients = "Any client with an API key" if api.settings.keys else "Any client that reaches this server"
    logger.warning(
        "%s can load and unload LoRA adapters over HTTP (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)", clients
    )
    described: dict[str, Any] = replies_of(None, 400, 403, 404, 413, 500, 503)
    described["responses"][200] = _TEXT

    @app.post("/v1/load_lora_adapter", **described, **BODY)
    async def load_lora_adapter(body: LoadAdapterBody) -> Response:
        """Load a LoRA adapter and serve it under its name; returns when it is loaded."""
        name, location = body.lora_name, body.lora_path
        if not name or not location:
            raise InvalidUserInput("Both 'lora_name' and 'lora_path' must be provided.")
        await api.adapters.load(
            name,
            location,
            base=body.base_model_name,
            inplace=bool(body.load_inplace),
            is_3d=bool(body.is_3d_lora_weight),
        )
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", **described, **BODY)
    async def unload_lora_adapter(body: UnloadAdapterBody) -> Response:
        """Unload an adapter. Returns when the requests that use the adapter have ended."""
        if not body.lora_name:
            raise InvalidUserInput("'lora_name' needs to be provided to unload a LoRA adapter.")
        await api.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
