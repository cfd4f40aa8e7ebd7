"""The application: routes over an engine, and what stands around them."""

import functools
import json
import uuid
from typing import Annotated, Any, Literal, Union

from fastapi import Depends, FastAPI, Query, Request
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.data.params import INT64_MAX
from quire.errors import EngineError, RequestError
from quire.metrics.keys import KeyPages
from quire.server import replies
from quire.server.answering import ClientGone
from quire.server.chat import answer_chat
from quire.server.completions import answer_completion
from quire.server.direct import MAYBE_SURROGATE, Direct, Respond
from quire.server.embeddings import answer_classify, answer_embeddings, answer_pooling
from quire.server.engine import Engine
from quire.server.errors import (
    NotFound,
    add_error_handlers,
    error_info,
    error_response,
    json_response,
    nobody,
)
from quire.server.gate import Gate
from quire.server.generate import Api
from quire.server.keys import Ledger
from quire.server.messages.answer import answer_messages, count_tokens
from quire.server.messages.bodies import (
    CountBody,
    CountReply,
    MessageErrorReply,
    MessageReply,
    MessagesBody,
)
from quire.server.messages.errors import MessageErrors
from quire.server.observe import Observed
from quire.server.operate import add_operate_routes
from quire.server.page import OPEN_PATHS, Feed, add_page
from quire.server.pooling_bodies import (
    ClassifyReply,
    EmbeddingInput,
    EmbeddingReply,
    EmbeddingTalk,
    InputBody,
    PoolingInputBody,
    PoolingReply,
    PoolingTalk,
    RerankBody,
    RerankReply,
    ScoreBody,
    ScoreReply,
    TalkBody,
)
from quire.server.render import derender_chat, derender_completion, render_chat, render_completion
from quire.server.replies import ErrorReply
from quire.server.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeChat, TokenizeText
from quire.server.responses.bodies import ResponseBody
from quire.server.responses.replies import DeletedReply, ItemsReply, ResponseReply
from quire.server.responses.routes import Responses
from quire.server.scores import answer_rerank, answer_score
from quire.server.settings import ServerSettings, paths
from quire.server.several import answer_any, answer_chats, shapes
from quire.server.token_bodies import (
    ChatBatchBody,
    DerenderChatBody,
    DerenderCompletionBody,
    RenderedReply,
    TokensBody,
    TokensReply,
)
from quire.server.tokenize import detokenize, tokenize
from quire.server.tokens import answer_tokens


class Application:
    """The ASGI application with the handles that a drain needs."""

    def __init__(self, engine: Engine, settings: ServerSettings, keys: KeyPages | None = None) -> None:
        """`keys` are shared by the processes of a server."""
        self.api = Api(engine, settings)
        docs = not settings.api.disable_fastapi_docs
        self.routes = FastAPI(
            title="Quire",
            version=engine.facts.version,
            openapi_url="/openapi.json" if docs else None,
            docs_url="/docs" if docs else None,
            redoc_url="/redoc" if docs else None,
        )
        add_error_handlers(self.routes, log_stack=settings.log.log_error_stack)
        self.routes.add_exception_handler(ClientGone, lambda *_: nobody())
        add_generate_routes(self.routes, self.api)
        add_response_routes(self.routes, Responses(self.api))
        add_message_routes(self.routes, self.api)
        add_token_routes(self.routes, self.api)
        add_pooling_routes(self.routes, self.api)
        add_model_routes(self.routes, self.api)
        add_operator_routes(self.routes, self.api)
        add_operate_routes(self.routes, self.api)
        self.feed: Feed = add_page(self.routes, engine)
        self.routes.openapi = lambda: _document(self.routes)  # type: ignore[method-assign]
        self.asgi = _surrounded(self.routes, self.api, settings, Ledger(settings.keys, keys))


def _surrounded(app: ASGIApp, api: Api, settings: ServerSettings, ledger: Ledger) -> ASGIApp:
    access = settings.access
    busy: dict[str, tuple[Any, Respond]] = {
        "/v1/chat/completions": (ChatBody, functools.partial(answer_chat, api)),
        "/v1/completions": (CompletionBody, functools.partial(answer_completion, api)),
        "/v1/messages": (MessagesBody, functools.partial(answer_messages, api)),
        "/v1/embeddings": (EmbeddingInput | EmbeddingTalk, functools.partial(answer_embeddings, api)),
    }
    gate = Gate(
        Direct(app, busy, log_stack=settings.log.log_error_stack),
        ledger=ledger,
        open_paths=paths(access.api_key_exempt) | OPEN_PATHS,
        max_body_bytes=settings.http.max_request_body_bytes,
        echo_request_id=settings.api.enable_request_id_headers,
    )
    inner = MessageErrors(gate)
    cors = CORSMiddleware(
        inner,
        allow_origins=access.allowed_origins,
        allow_credentials=access.allow_credentials,
        allow_methods=access.allowed_methods,
        allow_headers=access.allowed_headers,
    )

    async def entrance(scope: Scope, receive: Receive, send: Send) -> None:
        """Only a browser on another page sends an origin; the rest need not pay for every chunk."""
        foreign = any(name == b"origin" for name, _ in scope.get("headers", ()))
        await (cors if foreign else inner)(scope, receive, send)

    return Observed(entrance, api.engine.count_exchange)


async def _valid_text(request: Request) -> None:
    raw = await request.body()
    if MAYBE_SURROGATE.search(raw):
        try:
            json.dumps(json.loads(raw), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(error.object[error.start]):04X}"
            raise RequestError(f"the body holds the lone surrogate {found}; remove it") from None


_BODY: dict[str, Any] = {"dependencies": [Depends(_valid_text)]}


def _replies(model: type, *codes: int, stream: bool = False, error: type = ErrorReply) -> dict[str, Any]:
    """The `responses` of a route's document, with those that every route may give."""
    described: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    if stream:
        text = {"schema": {"type": "string"}, "example": 'data: {"choices": []}\n\ndata: [DONE]\n\n'}
        described[200]["content"] = {"text/event-stream": text}
    described |= {code: {"model": error} for code in codes}
    return {"responses": described, "response_model": None}


def add_generate_routes(app: FastAPI, api: Api) -> None:
    codes = (400, 404, 413, 429, 500, 503)

    @app.post("/v1/chat/completions", **_replies(replies.ChatReply, *codes, stream=True), **_BODY)
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        return await answer_chat(api, body, request)

    @app.post("/v1/completions", **_replies(replies.CompletionReply, *codes, stream=True), **_BODY)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue one or more prompts, whole or as a stream of events."""
        return await answer_completion(api, body, request)

    @app.post("/tokenize", **_replies(replies.TokenizeReply, 400, 404, 413), **_BODY)
    async def create_tokens(body: TokenizeChat | TokenizeText) -> Response:
        """The token ids of a text or of a conversation."""
        return await tokenize(api, body)

    @app.post("/detokenize", **_replies(replies.DetokenizeReply, 400, 404, 413), **_BODY)
    async def create_text(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        return await detokenize(api, body)


def add_response_routes(app: FastAPI, responses: Responses) -> None:
    codes, kept = (400, 404, 413, 429, 500, 503), (400, 404)
    reply = functools.partial(_replies, ResponseReply)

    @app.post("/v1/responses", **reply(*codes, stream=True), **_BODY)
    async def create_response(body: ResponseBody, request: Request) -> Response:
        """Answer a conversation of items, whole or as a stream of events."""
        return await responses.create(body, request)

    @app.get("/v1/responses/{response_id}", **reply(*kept, stream=True))
    async def show_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=-1, le=INT64_MAX)] = None,
    ) -> Response:
        """A response that is kept; of one in the background its events, from a number on."""
        return responses.show(response_id, request, stream=stream, starting_after=starting_after)

    @app.delete("/v1/responses/{response_id}", **_replies(DeletedReply, *kept))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a response; one that runs in the background ends."""
        return await responses.delete(response_id, request)

    @app.post("/v1/responses/{response_id}/cancel", **reply(*kept, 413))
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End a response in the background."""
        return await responses.cancel(response_id, request)

    @app.get("/v1/responses/{response_id}/input_items", **_replies(ItemsReply, *kept))
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The items that a response answers, those of earlier responses too."""
        return responses.input_items(response_id, request, limit=limit, order=order, after=after)


def add_message_routes(app: FastAPI, api: Api) -> None:
    codes = (400, 404, 413, 429, 500, 503)

    @app.post("/v1/messages", **_replies(MessageReply, *codes, stream=True, error=MessageErrorReply), **_BODY)
    async def create_message(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation of Anthropic's API, whole or as a stream of events."""
        return await answer_messages(api, body, request)

    @app.post("/v1/messages/count_tokens", **_replies(CountReply, *codes, error=MessageErrorReply), **_BODY)
    async def count_message_tokens(body: CountBody) -> Response:
        """How many tokens the prompt of a conversation has."""
        return await count_tokens(api, body)


def add_token_routes(app: FastAPI, api: Api) -> None:
    codes = (400, 404, 413, 429, 500, 503)
    chat, completion = "/v1/chat/completions", "/v1/completions"

    @app.post("/inference/v1/generate", **_replies(TokensReply, *codes, stream=True), **_BODY)
    async def create_tokens_of_tokens(body: TokensBody, request: Request) -> Response:
        """Continue token ids, whole or as a stream of events."""
        return await answer_tokens(api, body, request)

    @app.post(f"{chat}/render", **_replies(RenderedReply, *codes), **_BODY)
    async def show_chat_prompt(body: ChatBody, request: Request) -> Response:
        """What would go to the engine for a chat."""
        return await render_chat(api, body, request)

    @app.post(f"{completion}/render", **_replies(list[RenderedReply], *codes), **_BODY)
    async def show_completion_prompts(body: CompletionBody, request: Request) -> Response:
        """What would go to the engine for each prompt."""
        return await render_completion(api, body, request)

    @app.post(f"{chat}/derender", **_replies(replies.ChatReply, *codes), **_BODY)
    async def show_chat_answer(body: DerenderChatBody, request: Request) -> Response:
        """The answer to a chat that tokens are."""
        return await derender_chat(api, body, request)

    @app.post(f"{completion}/derender", **_replies(replies.CompletionReply, *codes), **_BODY)
    async def show_completion_answer(body: DerenderCompletionBody, request: Request) -> Response:
        """The completions that tokens are."""
        return await derender_completion(api, body, request)

    @app.post(f"{chat}/batch", **_replies(replies.ChatReply, *codes), **_BODY)
    async def create_chat_batch(body: ChatBatchBody, request: Request) -> Response:
        """Answer conversations, each as one choice."""
        return await answer_chats(api, body, request)

    async def invoke(body: Any, request: Request) -> Response:
        """What the body is made for: a chat or a completion, or one of the routes of a pooling model."""
        return await answer_any(api, body, request)

    invoke.__annotations__["body"] = Union[tuple(shapes(api))]  # noqa: UP007
    app.post("/invocations", **_replies(dict[str, Any], *codes, stream=True), **_BODY)(invoke)


def add_pooling_routes(app: FastAPI, api: Api) -> None:
    codes = (400, 404, 413, 429, 500, 503)
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    async def create_embeddings(body: EmbeddingInput | EmbeddingTalk, request: Request) -> Response:
        """A vector for each input."""
        return await answer_embeddings(api, body, request)

    async def create_pooling(body: PoolingInputBody | PoolingTalk, request: Request) -> Response:
        """What the model is for, or vectors or classes of every token."""
        return await answer_pooling(api, body, request)

    async def create_classes(body: InputBody | TalkBody, request: Request) -> Response:
        """How likely each class is, for each input."""
        return await answer_classify(api, body, request)

    async def create_score(body: ScoreBody, request: Request) -> Response:
        """How well texts fit, one to one or one to many."""
        return await answer_score(api, body, request)

    async def create_rerank(body: RerankBody, request: Request) -> Response:
        """Documents in the order in which they fit a query."""
        return await answer_rerank(api, body, request)

    for answer, reply, *places in (
        (create_embeddings, EmbeddingReply, "/v1/embeddings"),
        (create_pooling, PoolingReply, "/pooling"),
        (create_classes, ClassifyReply, "/classify"),
        (create_score, ScoreReply, "/score", "/v1/score"),
        (create_rerank, RerankReply, "/rerank", "/v1/rerank", "/v2/rerank"),
    ):
        described = _replies(reply, *codes)
        if reply in (EmbeddingReply, PoolingReply):
            described["responses"][200]["content"] = octets
        for place in places:
            app.add_api_route(place, answer, methods=["POST"], **described, **_BODY)


def add_model_routes(app: FastAPI, api: Api) -> None:
    created = int(api.engine.facts.start_time)

    def card(name: str) -> dict[str, Any]:
        facts = api.engine.facts
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
            "root": facts.root,
            "parent": None,
            "max_model_len": api.engine.inputs.max_model_len,
            "permission": [permission],
        }

    @app.get("/v1/models", **_replies(replies.ModelList, 503))
    async def list_models() -> Response:
        """Every name that the model is served under, once it can be asked: clients wait for this answer."""
        api.engine.check()
        return json_response(
            {"object": "list", "data": [card(name) for name in api.engine.facts.model_names]}
        )

    @app.get("/v1/models/{name:path}", **_replies(replies.ModelCard, 404))
    async def show_model(name: str) -> Response:
        """One of the served names."""
        if name not in api.engine.facts.model_names:
            raise NotFound(f"The model `{name}` does not exist.", param="model")
        return json_response(card(name))


def add_operator_routes(app: FastAPI, api: Api) -> None:
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

    @app.get("/version", **_replies(replies.VersionReply))
    async def show_version() -> Response:
        return json_response({"version": api.engine.facts.version})

    @app.get("/load", **_replies(replies.LoadReply))
    async def show_load() -> Response:
        """Requests being answered by this process."""
        return json_response({"server_load": api.engine.num_in_flight})

    text = {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", responses={200: text}, response_class=Response)
    async def metrics() -> Response:
        """Metrics over all processes, in Prometheus' format."""
        return Response(api.engine.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/reset_prefix_cache", **_replies(replies.ResetReply, 400, 500, 503))
    async def reset_prefix_cache(reset_running_requests: bool = False) -> Response:
        """Forget all cached prefixes; false while requests hold some, unless these are to start again."""
        return json_response({"success": await api.engine.reset_prefix_cache(reset_running_requests)})


def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with 400 in place of the 422 that this server never sends."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
