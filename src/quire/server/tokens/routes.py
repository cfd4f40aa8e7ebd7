"""Routes for token ids: tokenize, render, tokens in and out, batches of chats, and /invocations."""

from typing import Any, Union

from fastapi import FastAPI, Request
from starlette.responses import Response

from quire.server.http.document import BODY, CODES, replies_of
from quire.server.openai import replies
from quire.server.openai.batch import answer_any, answer_chats, shapes
from quire.server.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeChat, TokenizeText
from quire.server.openai.service import GenerationService
from quire.server.tokens.answer import answer_tokens
from quire.server.tokens.bodies import (
    ChatBatchBody,
    DerenderChatBody,
    DerenderCompletionBody,
    RenderedReply,
    TokensBody,
    TokensReply,
)
from quire.server.tokens.render import derender_chat, derender_completion, render_chat, render_completion
from quire.server.tokens.tokenize import detokenize, tokenize


def add_tokens_in_out(app: FastAPI, api: GenerationService) -> None:
    """Add the route that needs no tokenizer."""

    @app.post("/inference/v1/generate", **replies_of(TokensReply, *CODES, stream=True), **BODY)
    async def create_tokens_of_tokens(body: TokensBody, request: Request) -> Response:
        """Generate tokens after token ids, whole or as a stream of events."""
        return await answer_tokens(api, body, request)


def add_token_routes(app: FastAPI, api: GenerationService) -> None:
    chat, completion = "/v1/chat/completions", "/v1/completions"

    @app.post(f"{chat}/render", **replies_of(RenderedReply, *CODES), **BODY)
    async def show_chat_prompt(body: ChatBody, request: Request) -> Response:
        """Return the tokens and parameters that a chat would send to the engine."""
        async with api.long_work.place(request):
            return await render_chat(api, body, request)

    @app.post(f"{completion}/render", **replies_of(list[RenderedReply], *CODES), **BODY)
    async def show_completion_prompts(body: CompletionBody, request: Request) -> Response:
        """Return the tokens and parameters that each prompt would send to the engine."""
        async with api.long_work.place(request):
            return await render_completion(api, body, request)

    @app.post(f"{chat}/derender", **replies_of(replies.ChatReply, *CODES), **BODY)
    async def show_chat_answer(body: DerenderChatBody, request: Request) -> Response:
        """Convert generated tokens to the reply of a chat."""
        async with api.long_work.place(request):
            return await derender_chat(api, body, request)

    @app.post(f"{completion}/derender", **replies_of(replies.CompletionReply, *CODES), **BODY)
    async def show_completion_answer(body: DerenderCompletionBody, request: Request) -> Response:
        """Convert generated tokens to the reply of a completion."""
        async with api.long_work.place(request):
            return await derender_completion(api, body, request)

    @app.post(f"{chat}/batch", **replies_of(replies.ChatReply, *CODES), **BODY)
    async def create_chat_batch(body: ChatBatchBody, request: Request) -> Response:
        """Answer several conversations, each as one choice."""
        return await answer_chats(api, body, request)

    async def invoke(body: Any, request: Request) -> Response:
        """Handle the body as a chat, a completion or a request of a pooling route, by its fields."""
        return await answer_any(api, body, request)

    invoke.__annotations__["body"] = Union[tuple(shapes(api))]  # noqa: UP007
    app.post("/invocations", **replies_of(dict[str, Any], *CODES, stream=True), **BODY)(invoke)

    @app.post("/tokenize", **replies_of(replies.TokenizeReply, 400, 404, 413, 422, 429), **BODY)
    async def create_tokens(body: TokenizeChat | TokenizeText, request: Request) -> Response:
        """Return the token ids of a text or conversation."""
        async with api.long_work.place(request):
            return await tokenize(api, body)

    @app.post("/detokenize", **replies_of(replies.DetokenizeReply, 400, 404, 413, 429), **BODY)
    async def create_text(body: DetokenizeBody, request: Request) -> Response:
        """Return the text of token ids."""
        async with api.long_work.place(request):
            return await detokenize(api, body)
