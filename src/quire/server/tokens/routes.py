"""Routes for token ids: tokenize, render, tokens in and out, batches of chats, and /invocations."""

from typing import Any, Union

from fastapi import FastAPI, Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.http.errors import json_response
from quire.server.http.openapi_document import BODY, CODES, add_post, replies_of
from quire.server.openai import replies
from quire.server.openai.batch import body_handlers, create_chat_batch
from quire.server.openai.requests import DetokenizeBody, TokenizeChat, TokenizeText
from quire.server.openai.sampling_params import check_contents, check_fields, check_template
from quire.server.openai.service import GenerationService, limit_long_bodies
from quire.server.openai.work_size import off_loop
from quire.server.tokens.answer import create_tokens_of_tokens
from quire.server.tokens.bodies import RenderedReply, TokensReply
from quire.server.tokens.render import (
    check_vocab,
    show_chat_answer,
    show_chat_prompt,
    show_completion_answer,
    show_completion_prompts,
)

_MAX_IDS = 1 << 17
"""Token ids that a request to /detokenize may have even if max_model_len is less. Decoding this many holds
the GIL for tens of milliseconds."""


def add_tokens_in_out(app: FastAPI, api: GenerationService) -> None:
    """Add /inference/v1/generate, which needs no tokenizer."""
    add_post(app, api, "/inference/v1/generate", create_tokens_of_tokens, TokensReply, stream=True)


def add_token_routes(app: FastAPI, api: GenerationService) -> None:
    chat, completion = "/v1/chat/completions", "/v1/completions"
    add_post(app, api, f"{chat}/render", show_chat_prompt, RenderedReply)
    add_post(app, api, f"{completion}/render", show_completion_prompts, list[RenderedReply])
    add_post(app, api, f"{chat}/derender", show_chat_answer, replies.ChatReply)
    add_post(app, api, f"{completion}/derender", show_completion_answer, replies.CompletionReply)
    add_post(app, api, f"{chat}/batch", create_chat_batch, replies.ChatReply)

    async def invoke(body: Any, request: Request) -> Response:
        """Handle the body as a chat, a completion or a request of a pooling route, by its fields."""
        response: Response = await handlers[type(body)](api, body, request)
        return response

    handlers = body_handlers(api)
    invoke.__annotations__["body"] = Union[tuple(handlers)]  # noqa: UP007
    app.post("/invocations", **replies_of(dict[str, Any], *CODES, stream=True), **BODY)(invoke)
    add_post(app, api, "/tokenize", create_tokens, replies.TokenizeReply, codes=(400, 404, 413, 422, 429))
    add_post(app, api, "/detokenize", create_text, replies.DetokenizeReply, codes=(400, 404, 413, 429))


@limit_long_bodies
async def create_tokens(
    api: GenerationService, body: TokenizeChat | TokenizeText, request: Request
) -> Response:
    """Return the token ids of a text or conversation."""
    model = await api.names.find(body.model, request)
    check_fields(body)
    tokenizer = model.need_tokenizer()
    if isinstance(body, TokenizeChat):
        check_contents(body)
        check_template(body.chat_template, api.settings.api.trust_request_chat_template)
        ids = (await api.reader.read_chat(body, model, limited=False)).token_ids
    else:
        text, special = body.prompt, body.add_special_tokens
        model.inputs.check_chars(text)
        ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))

    def encode() -> Response:
        spelled = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return json_response(
            {
                "count": len(ids),
                "max_model_len": model.inputs.max_model_len,
                "tokens": ids,
                "token_strs": spelled,
            }
        )

    return await off_loop(len(ids), encode)


@limit_long_bodies
async def create_text(api: GenerationService, body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids."""
    model = await api.names.find(body.model, request)
    check_fields(body)
    tokenizer, ids = model.need_tokenizer(), body.tokens
    limit = max(model.inputs.max_model_len, _MAX_IDS)
    if len(ids) > limit:
        raise RequestError(
            f"{len(ids)} token ids are too many: at most {limit} are allowed per request (max_model_len, or "
            f"{_MAX_IDS} if that is more): send them in parts",
            param="tokens",
        )
    check_vocab(ids, model.inputs.vocab, param="tokens")
    return await off_loop(
        len(ids), lambda: json_response({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})
    )
