"""The ASGI application: the routes, and the middleware around them."""

from fastapi import FastAPI
from starlette.types import ASGIApp

from quire.frontend.engine import AsyncEngine
from quire.metrics.api_keys import KeyPages
from quire.server.anthropic.errors import MessageErrorMiddleware
from quire.server.anthropic.routes import add_message_routes
from quire.server.audio.routes import MAX_FIELDS_BYTES, PATHS, add_speech_routes
from quire.server.http.cors import CorsMiddleware
from quire.server.http.errors import add_error_handlers
from quire.server.http.fast_path import FastPath
from quire.server.http.limits import AdmissionMiddleware
from quire.server.http.metrics import MetricsMiddleware
from quire.server.http.middleware import wrap_in_middleware
from quire.server.http.openapi_document import add_post, document
from quire.server.http.root_path import RootPath
from quire.server.key_limits import Ledger
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.routes import add_adapter_routes
from quire.server.openai import replies
from quire.server.openai.chat import create_chat_completion
from quire.server.openai.completions import create_completion
from quire.server.openai.models import add_model_routes
from quire.server.openai.scoring import add_scoring_route
from quire.server.openai.service import GenerationService
from quire.server.ops.routes import add_operate_routes
from quire.server.ops.status import add_status_routes
from quire.server.ops.unsupported_routes import add_absent_routes
from quire.server.ops.weights import version_header
from quire.server.page import OPEN_PATHS, SnapshotFeed, add_page
from quire.server.pooling.routes import add_pooling_routes
from quire.server.responses.routes import Responses, add_response_routes
from quire.server.settings import ServerSettings, paths
from quire.server.tokens.routes import add_token_routes, add_tokens_in_out


class Application:
    """The ASGI application of one model. A shutdown also uses `api`, which has the running requests, and
    `feed`, the event stream of the web page."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        keys: KeyPages | None = None,
        registry: LoRARegistry | None = None,
    ) -> None:
        """Build the routes and the middleware. All API processes of a server share `keys`, the counters of
        the API keys, and `registry`, the LoRA adapters."""
        self.api = GenerationService(engine, settings, registry)
        docs = not settings.api.disable_fastapi_docs
        self.routes = FastAPI(
            title="Quire",
            version=engine.facts.version,
            openapi_url="/openapi.json" if docs else None,
            docs_url="/docs" if docs else None,
            redoc_url="/redoc" if docs else None,
        )
        add_error_handlers(self.routes, log_stack=settings.log.log_error_stack)
        add_tokens_in_out(self.routes, self.api)
        if not settings.api.tokens_only:
            _add_text_routes(self.routes, self.api)
        add_model_routes(self.routes, self.api)
        add_status_routes(self.routes, self.api)
        add_operate_routes(self.routes, self.api)
        add_adapter_routes(self.routes, self.api)
        add_absent_routes(self.routes)
        self.feed: SnapshotFeed = add_page(self.routes, engine)
        self.routes.openapi = lambda: document(self.routes)  # type: ignore[method-assign]
        self.inner = inner_app(self.routes, self.api, settings)
        """The routes without middleware, for a server with several models."""
        self.asgi = wrap(self.inner, engine, settings, Ledger(settings.keys, keys))


def _add_text_routes(app: FastAPI, api: GenerationService) -> None:
    chat, completions = "/v1/chat/completions", "/v1/completions"
    add_post(app, api, chat, create_chat_completion, replies.ChatReply, stream=True)
    add_post(app, api, completions, create_completion, replies.CompletionReply, stream=True)
    add_response_routes(app, Responses(api))
    add_message_routes(app, api)
    add_token_routes(app, api)
    add_scoring_route(app, api)
    add_pooling_routes(app, api)
    add_speech_routes(app, api)


def inner_app(app: FastAPI, api: GenerationService, settings: ServerSettings) -> ASGIApp:
    """Return the routes of a model behind `FastPath`, which parses JSON bodies. With LoRA, the adapters of a
    request are not removed before the request has ended."""
    fast_path = FastPath(app, log_stack=settings.log.log_error_stack)
    return api.adapters.hold_adapters(fast_path) if api.adapters.enabled else fast_path


def wrap(app: ASGIApp, engine: AsyncEngine, settings: ServerSettings, ledger: Ledger) -> ASGIApp:
    """Return `app` wrapped in the server's middleware. `engine` counts the HTTP requests and reports the
    version of the weights for a response header."""
    access = settings.access
    middleware = AdmissionMiddleware(
        app,
        ledger=ledger,
        open_paths=paths(access.api_key_exempt) | OPEN_PATHS,
        max_body_bytes=settings.http.max_request_body_bytes,
        echo_request_id=settings.api.enable_request_id_headers,
        form_paths=frozenset(PATHS),
        max_form_bytes=settings.max_audio_bytes + MAX_FIELDS_BYTES,
        weight_version=lambda: version_header(engine.operation),
    )
    wrapped = wrap_in_middleware(
        CorsMiddleware(MessageErrorMiddleware(middleware), access), access.middleware
    )
    counted = MetricsMiddleware(wrapped, engine.observe_exchange)
    return RootPath(counted, settings.http.root_path) if settings.http.root_path else counted
