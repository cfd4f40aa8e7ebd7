"""Several models behind one address: the `model` of a request chooses one of them (docs/models_config.md)."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError, RequestError
from quire.frontend.model_pool import ModelPool, PoolModel
from quire.metrics.api_keys import KeyPages
from quire.server.app import Application, wrap
from quire.server.audio.routes import PATHS as FORM_PATHS
from quire.server.http.errors import (
    Forbidden,
    add_error_handlers,
    client_gone,
    error_info,
    error_response,
    http_error,
    json_response,
    quire_error,
)
from quire.server.http.fast_path import read_body, replay
from quire.server.http.in_flight import ClientGone
from quire.server.http.limits import FREE_PATHS, TOKENLESS_PATHS, is_operator, route_path
from quire.server.key_limits import Ledger
from quire.server.openai.models import model_cards
from quire.server.openai.service import no_model
from quire.server.ops.status import METRICS_TYPE
from quire.server.settings import ServerSettings

LORA_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_POOL_PATHS = ("/sleep", "/wake_up")
"""Routes of a single engine that would change the state of a model without the pool."""
_STATUS_PATHS = frozenset({"/v1/models", "/health", "/ping", "/load", "/metrics"})
_MAX_FORM_FIELD = 1 << 16
"""Maximum size in bytes of the part of a form that names the model."""
_LARGE = 1 << 20
"""Size in bytes above which the model is looked up in a thread."""
_FORM_MODEL = re.compile(rb'name="?model"?[;\r]')
"""Header of the part of a form that names the model."""


class _Names(msgspec.Struct):
    """The fields of a body that name a model or an adapter."""

    model: str | None = None
    base_model_name: str | None = None
    lora_name: str | None = None


class ModelBody(BaseModel):
    """The name of a model to load or unload."""

    model: str = Field(min_length=1, max_length=512)


class ServedModel:
    """A model of a server with several: its routes, and its place in the pool."""

    def __init__(self, application: Application, place: PoolModel) -> None:
        self.application = application
        self.api = application.api
        self.place = place
        routes = (route for route in application.routes.routes if isinstance(route, Route))
        paths = {route.path for route in routes if "POST" in (route.methods or ())}
        self.engine_paths = paths - FREE_PATHS.keys() - (TOKENLESS_PATHS - LORA_PATHS)
        """Paths with POSTs that need the engine."""

    def cards(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the model and its adapters, with the state of the model."""
        place = self.place
        status: dict[str, Any] = {"value": place.state, "pinned": place.pinned}
        if place.sleep_level:
            status["sleep_level"] = place.sleep_level
        if place.error:
            status["error"] = place.error
        status["memory_bytes"] = place.num_bytes
        return {name: card | {"status": status} for name, card in model_cards(self.api).items()}


class ModelRouter:
    """ASGI application that sends each request to the routes of its model, once that model is awake."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        pool: ModelPool,
        settings: ServerSettings,
        metrics_text: Callable[[], str],
    ) -> None:
        """Set the models; the first one answers requests that name none."""
        self._models = list(models)
        self._pool = pool
        self._settings = settings
        self._log_stack = settings.log.log_error_stack
        self._app = FastAPI(title="Quire", openapi_url=None)
        add_error_handlers(self._app, log_stack=self._log_stack)
        self._app.add_exception_handler(ClientGone, lambda *_: client_gone())
        self._add_status_routes(metrics_text)
        self._add_pool_routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path in _STATUS_PATHS or path.startswith("/v1/models/"):
            return await self._app(scope, receive, send)
        try:
            await self._answer(path, scope, receive, send)
        except ClientGone:
            await client_gone()(scope, receive, send)
        except HTTPException as error:  # the body is too long
            await http_error(error)(scope, receive, send)
        except QuireError as error:
            await quire_error(error, log_stack=self._log_stack)(scope, receive, send)

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
        await model.api.answering.until_gone(receive, self._pool.acquire(model.place))
        try:
            await model.application.inner(scope, replay(body, receive), send)
        finally:
            self._pool.release(model.place)

    async def _choose(self, path: str, scope: Scope, body: bytes) -> ServedModel:
        """Return the model that a body names; a body that cannot be read goes to the first one, which reports
        the error."""
        is_large = len(body) > _LARGE
        names = await asyncio.to_thread(_names_of, path, body) if is_large else _names_of(path, body)
        if path not in LORA_PATHS:
            return self.find(names.model or _query_model(scope))
        if names.base_model_name:
            return self.find(names.base_model_name)
        owner = self._owner(names.lora_name) if names.lora_name else None
        enabled = [model for model in self._models if model.api.adapters.enabled]
        return owner or next(iter(enabled), self._models[0])

    def find(self, name: str | None) -> ServedModel:
        """Return the model with this name, or with an adapter of this name; raise NotFound."""
        if not name:
            return self._models[0]
        if (model := self._owner(name)) is not None:
            return model
        for model in self._models:
            if model.api.adapters.may_resolve(name):
                return model
        raise no_model(name, self._cards())

    def _owner(self, name: str) -> ServedModel | None:
        for model in self._models:
            if name in model.api.engine.facts.model_names or model.api.adapters.get(name) is not None:
                return model
        return None

    # ---- routes

    def _add_status_routes(self, metrics_text: Callable[[], str]) -> None:
        app = self._app

        async def health(model: str | None = None) -> Response:
            """Whether the server makes progress, or whether one model does: 200, or 503 with the cause."""
            try:
                self._check(model)
            except RequestError:
                raise
            except QuireError as error:
                return error_response(error_info(str(error), 503, "ServiceUnavailableError"))
            return Response(status_code=200)

        for path, methods in (("/health", ["GET", "HEAD"]), ("/ping", ["GET", "HEAD", "POST"])):
            app.add_api_route(path, health, methods=methods)

        @app.get("/load")
        async def show_load() -> Response:
            num_running = sum(model.api.engine.num_in_flight for model in self._models)
            return json_response({"server_load": num_running})

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(metrics_text(), media_type=METRICS_TYPE)

    def _check(self, name: str | None) -> None:
        if name is None:
            return self._pool.check()
        model = self.find(name)
        self._pool.check_model(model.place)

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
            await model.api.answering.until_gone(request.receive, self._pool.load(model.place))
            return _state_of(model)

        @app.post("/v1/models/unload")
        async def unload_model(body: ModelBody, request: Request) -> Response:
            """Unload a model when its running requests have finished. The next request loads it again."""
            model = self._model_to_change(body, request)
            await self._pool.unload(model.place)
            return _state_of(model)

        @app.get("/v1/models/{name:any}")
        async def show_model(name: str) -> Response:
            """Return one served model or adapter."""
            if (card := self._cards().get(name)) is None:
                raise no_model(name, self._cards())
            return json_response(card)

    def _cards(self) -> dict[str, dict[str, Any]]:
        return {name: card for model in self._models for name, card in model.cards().items()}

    def _model_to_change(self, body: ModelBody, request: Request) -> ServedModel:
        """Return the model of a request that loads or unloads it; raise Forbidden without the right to."""
        if not self._settings.dev_mode and not is_operator(request.scope):
            raise Forbidden(
                "Only operators load and unload models: give a key `operator: true` in the file of --api-key "
                "and send that key."
            )
        return self.find(body.model)


def _state_of(model: ServedModel) -> Response:
    return json_response({"model": model.place.name, "state": model.place.state})


def _names_of(path: str, body: bytes) -> _Names:
    """Return the names in a body; none if it is invalid."""
    if path in FORM_PATHS:
        return _Names(_form_model(body))
    try:
        return msgspec.json.decode(body, type=_Names) if body else _Names()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Names()


def _form_model(body: bytes) -> str | None:
    """Return the field `model` of a form, which stands between an empty line and the end of its line."""
    if (part := _FORM_MODEL.search(body)) is None:
        return None
    _, _, rest = body[part.start() : part.start() + _MAX_FORM_FIELD].partition(b"\r\n\r\n")
    name, line_end, _ = rest.partition(b"\r\n")
    return name.decode("utf-8", "replace") if line_end else None


def _query_model(scope: Scope) -> str | None:
    query = scope.get("query_string", b"")
    return parse_qs(query.decode("latin-1")).get("model", [None])[0] if b"model" in query else None


def models_app(
    models: Sequence[ServedModel],
    pool: ModelPool,
    settings: ServerSettings,
    metrics_text: Callable[[], str],
    keys: KeyPages | None = None,
) -> Any:
    """Return the ASGI application of several models, within the middleware of the server."""
    router = ModelRouter(models, pool, settings, metrics_text)
    return wrap(router, models[0].api.engine, settings, Ledger(settings.keys, keys))
