"""Several models behind one address: the `model` of a request chooses one of them (docs/models_config.md)."""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import QuireError, RequestError
from quire.frontend.engine import AsyncEngine
from quire.frontend.model_pool import ModelPool, PoolModel
from quire.metrics.api_keys import KeyPages
from quire.metrics.exposition import MergedMetrics, exposition
from quire.server.app import Application, wrap
from quire.server.audio.routes import PATHS as FORM_PATHS
from quire.server.http.errors import (
    ClientDisconnected,
    Forbidden,
    add_error_handlers,
    json_response,
    response_to,
)
from quire.server.http.fast_path import read_body, replay
from quire.server.http.limits import TOKENLESS_PATHS, UNLIMITED_PATHS, is_operator, route_path
from quire.server.key_limits import Ledger
from quire.server.openai.models import model_cards
from quire.server.openai.requested_model import unknown_model_error
from quire.server.ops.status import METRICS_TYPE, health_response
from quire.server.settings import ServerSettings

LORA_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_POOL_PATHS = ("/sleep", "/wake_up")
"""Routes that a server with several models refuses: its `ModelPool`, which decides when models sleep, would
not know of the change."""
_STATUS_PATHS = frozenset({"/v1/models", "/health", "/ping", "/load", "/metrics"})
_MAX_FORM_FIELD = 1 << 16
"""Maximum size in bytes of the part of a form that names the model."""
_LARGE_BYTES = 1 << 20
"""Size in bytes above which a body is searched for the model's name in a thread."""
_FORM_MODEL = re.compile(rb'name="?model"?[;\r]')
"""Pattern in the header of the form field `model`, in a multipart body."""


class _Names(msgspec.Struct):
    """Fields of a request body that name a model or a LoRA adapter; None for a field that the body does not
    have."""

    model: str | None = None
    base_model_name: str | None = None
    lora_name: str | None = None


class ModelBody(BaseModel):
    """The name of a model to load or unload."""

    model: str = Field(min_length=1, max_length=512)


class ServedModel:
    """One model of a server with several models: its routes, and its entry in the `ModelPool`, which loads
    models and puts them to sleep."""

    def __init__(self, application: Application, pool_model: PoolModel) -> None:
        self.application = application
        self.api = application.api
        self.pool_model = pool_model
        routes = (route for route in application.routes.routes if isinstance(route, Route))
        paths = {route.path for route in routes if "POST" in (route.methods or ())}
        self.engine_paths = paths - UNLIMITED_PATHS.keys() - (TOKENLESS_PATHS - LORA_PATHS)
        """Paths whose POST requests use the engine. They wait until the model is loaded and not asleep."""

    def cards(self) -> dict[str, dict[str, Any]]:
        """Return the entries of /v1/models for the model and its LoRA adapters, by name, with the model's
        state."""
        pool_model = self.pool_model
        status: dict[str, Any] = {"value": pool_model.state, "pinned": pool_model.pinned}
        if pool_model.sleep_level:
            status["sleep_level"] = pool_model.sleep_level
        if pool_model.error:
            status["error"] = pool_model.error
        status["memory_bytes"] = pool_model.num_bytes
        return {name: card | {"status": status} for name, card in model_cards(self.api).items()}


class ModelRouter:
    """ASGI application that sends each request to the routes of the model that it names. A request that needs
    the engine waits until its model is loaded and not asleep."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        pool: ModelPool,
        settings: ServerSettings,
    ) -> None:
        """Create a router. The first model answers requests that name no model."""
        self._models = list(models)
        self._pool = pool
        self._settings = settings
        self._log_stack = settings.log.log_error_stack
        self._app = FastAPI(title="Quire", openapi_url=None)
        add_error_handlers(self._app, log_stack=self._log_stack)
        self._add_status_routes()
        self._add_pool_routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path in _STATUS_PATHS or path.startswith("/v1/models/"):
            return await self._app(scope, receive, send)
        try:
            await self._answer(path, scope, receive, send)
        except (ClientDisconnected, HTTPException, QuireError) as error:
            await response_to(error, log_stack=self._log_stack)(scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "POST":
            model = self.find(_query_model(scope))
            return await model.application.inner(scope, receive, send)
        if path in _POOL_PATHS:
            raise RequestError(f"{path} is for one model: this server has /v1/models/load and /unload")
        body = await read_body(receive)
        model = await self._choose(path, scope, body)
        if path not in model.engine_paths:
            return await model.application.inner(scope, replay(body, receive), send)
        await model.api.running_requests.until_disconnect(receive, self._pool.acquire(model.pool_model))
        try:
            await model.application.inner(scope, replay(body, receive), send)
        finally:
            self._pool.release(model.pool_model)

    async def _choose(self, path: str, scope: Scope, body: bytes) -> ServedModel:
        """Return the model that the body names, else the model that the URL's query names, else the first
        model. An invalid body names no model; the routes of the returned model report the error."""
        is_large = len(body) > _LARGE_BYTES
        names = await asyncio.to_thread(_names_of, path, body) if is_large else _names_of(path, body)
        if path not in LORA_PATHS:
            return self.find(names.model or _query_model(scope))
        if names.base_model_name:
            return self.find(names.base_model_name)
        named_model = self._find_by_name(names.lora_name) if names.lora_name else None
        with_adapters = (model for model in self._models if model.api.adapters.enabled)
        return named_model or next(with_adapters, self._models[0])

    def find(self, name: str | None) -> ServedModel:
        """Return the model with this name or with a LoRA adapter of this name; without a name, the first
        model. Raise NotFound for an unknown name."""
        if not name:
            return self._models[0]
        loadable = (model for model in self._models if model.api.adapters.may_resolve(name))
        if (model := self._find_by_name(name) or next(loadable, None)) is None:
            raise unknown_model_error(name, self._cards())
        return model

    def _find_by_name(self, name: str) -> ServedModel | None:
        return next((model for model in self._models if name in model.api.names), None)

    # ---- routes

    def _add_status_routes(self) -> None:
        app = self._app

        async def health(model: str | None = None) -> Response:
            """Return 200 if the server, or the named model, makes progress, else 503 with the cause."""
            if model is None:
                return health_response(self._pool.check)
            return health_response(partial(self._pool.check_model, self.find(model).pool_model))

        for path, methods in (("/health", ["GET", "HEAD"]), ("/ping", ["GET", "HEAD", "POST"])):
            app.add_api_route(path, health, methods=methods)

        @app.get("/load")
        async def show_load() -> Response:
            num_running = sum(model.api.engine.num_in_flight for model in self._models)
            return json_response({"server_load": num_running})

        @app.get("/metrics")
        async def metrics() -> Response:
            text = merged_metrics_text([model.api.engine for model in self._models])
            return Response(text, media_type=METRICS_TYPE)

    def _add_pool_routes(self) -> None:
        app = self._app

        @app.get("/v1/models")
        async def list_models() -> Response:
            """List the names of all models and adapters, with their states."""
            return json_response({"object": "list", "data": list(self._cards().values())})

        @app.post("/v1/models/load")
        async def load_model(body: ModelBody, request: Request) -> Response:
            """Load a model or wake it up, and wait until it is awake."""
            model = self._model_to_change(body, request)
            await model.api.running_requests.until_disconnect(
                request.receive, self._pool.load(model.pool_model)
            )
            return _state_of(model)

        @app.post("/v1/models/unload")
        async def unload_model(body: ModelBody, request: Request) -> Response:
            """Unload a model when its running requests have finished. The next request loads it again."""
            model = self._model_to_change(body, request)
            await self._pool.unload(model.pool_model)
            return _state_of(model)

        @app.get("/v1/models/{name:any}")
        async def show_model(name: str) -> Response:
            """Return one served model or adapter."""
            if (card := self._cards().get(name)) is None:
                raise unknown_model_error(name, self._cards())
            return json_response(card)

    def _cards(self) -> dict[str, dict[str, Any]]:
        return {name: card for model in self._models for name, card in model.cards().items()}

    def _model_to_change(self, body: ModelBody, request: Request) -> ServedModel:
        """Return the model that a request loads or unloads. Raise Forbidden unless the request has an
        operator's key or the server is in developer mode."""
        if not self._settings.dev_mode and not is_operator(request.scope):
            raise Forbidden(
                "Only operators load and unload models: give a key `operator: true` in the file of --api-key "
                "and send that key."
            )
        return self.find(body.model)


def _state_of(model: ServedModel) -> Response:
    return json_response({"model": model.pool_model.name, "state": model.pool_model.state})


def _names_of(path: str, body: bytes) -> _Names:
    """Return the model and adapter names in a body; all are None if the body is invalid."""
    if path in FORM_PATHS:
        return _Names(_form_model(body))
    try:
        return msgspec.json.decode(body, type=_Names) if body else _Names()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Names()


def _form_model(body: bytes) -> str | None:
    """Return the value of the field `model` of a multipart form: the line after the empty line that ends the
    headers of its part."""
    if (part := _FORM_MODEL.search(body)) is None:
        return None
    _, _, rest = body[part.start() : part.start() + _MAX_FORM_FIELD].partition(b"\r\n\r\n")
    name, line_end, _ = rest.partition(b"\r\n")
    return name.decode("utf-8", "replace") if line_end else None


def _query_model(scope: Scope) -> str | None:
    query = scope.get("query_string", b"")
    return parse_qs(query.decode("latin-1")).get("model", [None])[0] if b"model" in query else None


def merged_metrics_text(engines: Sequence[AsyncEngine]) -> str:
    """Return the metrics of all models, in Prometheus' format."""
    by_model = {engine.metrics.model_name: engine.metrics.of_engines() for engine in engines}
    return exposition(MergedMetrics(by_model, engines[0].metrics.of_server()), is_only_process=True)


def models_app(
    models: Sequence[ServedModel], pool: ModelPool, settings: ServerSettings, keys: KeyPages | None = None
) -> ASGIApp:
    """Return the ASGI application of several models, wrapped in the server's middleware."""
    router = ModelRouter(models, pool, settings)
    return wrap(router, models[0].api.engine, settings, Ledger(settings.keys, keys))
