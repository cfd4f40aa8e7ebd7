"""The ASGI application: the routes, and the middleware around them."""

import functools
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.frontend.engine import AsyncEngine
from quire.metrics.keys import KeyPages
from quire.server.anthropic.answer import answer_messages
from quire.server.anthropic.bodies import MessagesBody
from quire.server.anthropic.errors import MessageErrors
from quire.server.anthropic.routes import add_message_routes
from quire.server.api_keys import Ledger
from quire.server.audio.routes import MAX_FIELDS_BYTES, PATHS, add_speech_routes
from quire.server.http.document import BODY, CODES, document, replies_of
from quire.server.http.errors import add_error_handlers, client_gone
from quire.server.http.fast_path import Direct, Respond, json_routes
from quire.server.http.in_flight import ClientGone
from quire.server.http.limits import HttpGate
from quire.server.http.metrics import Observed
from quire.server.http.middleware import wrap_in_middleware
from quire.server.http.origins import Origins
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.routes import add_adapter_routes
from quire.server.openai import replies
from quire.server.openai.chat import answer_chat
from quire.server.openai.completions import answer_completion
from quire.server.openai.requests import ChatBody, CompletionBody
from quire.server.openai.scoring import add_scoring_route
from quire.server.openai.service import GenerationService
from quire.server.ops.routes import add_operate_routes
from quire.server.ops.status import add_model_routes, add_status_routes
from quire.server.page import OPEN_PATHS, Feed, add_page
from quire.server.pooling.bodies import EmbeddingChatBody, EmbeddingInput
from quire.server.pooling.embeddings import answer_embeddings
from quire.server.pooling.routes import add_pooling_routes
from quire.server.responses.routes import Responses, add_response_routes
from quire.server.settings import ServerSettings, paths
from quire.server.tokens.routes import add_token_routes, add_tokens_in_out


class Application:
    """The ASGI application, with the handles that a drain needs."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        keys: KeyPages | None = None,
        registry: LoRARegistry | None = None,
    ) -> None:
        """Build routes and middleware. The API processes of a server share `keys` and `registry`."""
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
        self.routes.add_exception_handler(ClientGone, lambda *_: client_gone())
        add_tokens_in_out(self.routes, self.api)
        if not settings.api.tokens_only:
            _add_text_routes(self.routes, self.api)
        add_model_routes(self.routes, self.api)
        add_status_routes(self.routes, self.api)
        add_operate_routes(self.routes, self.api)
        add_adapter_routes(self.routes, self.api)
        self.feed: Feed = add_page(self.routes, engine)
        self.routes.openapi = lambda: document(self.routes)  # type: ignore[method-assign]
        self.asgi = _wrap(self.routes, self.api, settings, Ledger(settings.keys, keys))


def _add_text_routes(app: FastAPI, api: GenerationService) -> None:
    add_generate_routes(app, api)
    add_response_routes(app, Responses(api))
    add_message_routes(app, api)
    add_token_routes(app, api)
    add_scoring_route(app, api)
    add_pooling_routes(app, api)
    add_speech_routes(app, api)


def _wrap(app: FastAPI, api: GenerationService, settings: ServerSettings, ledger: Ledger) -> ASGIApp:
    access, tokens_only = settings.access, settings.api.tokens_only
    busy: dict[str, tuple[Any, Respond]] = {
        "/v1/chat/completions": (ChatBody, functools.partial(answer_chat, api)),
        "/v1/completions": (CompletionBody, functools.partial(answer_completion, api)),
        "/v1/messages": (MessagesBody, functools.partial(answer_messages, api)),
        "/v1/embeddings": (EmbeddingInput | EmbeddingChatBody, functools.partial(answer_embeddings, api)),
    }
    gate = HttpGate(
        Direct(app, {} if tokens_only else busy, json_routes(app), log_stack=settings.log.log_error_stack),
        ledger=ledger,
        open_paths=paths(access.api_key_exempt) | OPEN_PATHS,
        max_body_bytes=settings.http.max_request_body_bytes,
        echo_request_id=settings.api.enable_request_id_headers,
        form_paths=frozenset(PATHS),
        max_form_bytes=settings.max_audio_bytes + MAX_FIELDS_BYTES,
    )
    inner = MessageErrors(api.adapters.holding(gate) if api.adapters.enabled else gate)
    return Observed(wrap_in_middleware(Origins(inner, access), access.middleware), api.engine.count_exchange)


def add_generate_routes(app: FastAPI, api: GenerationService) -> None:
    @app.post("/v1/chat/completions", **replies_of(replies.ChatReply, *CODES, stream=True), **BODY)
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Create a chat completion, as one response or as a stream of events."""
        return await answer_chat(api, body, request)

    @app.post("/v1/completions", **replies_of(replies.CompletionReply, *CODES, stream=True), **BODY)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Create completions of one or more prompts, as one response or as a stream of events."""
        return await answer_completion(api, body, request)
