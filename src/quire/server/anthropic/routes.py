"""The routes of Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from quire.server.anthropic.bodies import CountBody, CountReply, MessageErrorReply, MessageReply, MessagesBody
from quire.server.anthropic.encoder import MessageEncoder
from quire.server.anthropic.translate import as_chat
from quire.server.http.errors import json_response
from quire.server.http.in_flight import num_body_bytes
from quire.server.http.openapi_document import add_post
from quire.server.openai.chat import prepare_chat
from quire.server.openai.requests import ChatBody
from quire.server.openai.run_call import answer_call
from quire.server.openai.sampling_params import check_template
from quire.server.openai.service import GenerationService, limit_long_bodies, releases_prefix
from quire.server.openai.work_size import off_loop


def add_message_routes(app: FastAPI, api: GenerationService) -> None:
    path = "/v1/messages"
    add_post(app, api, path, create_message, MessageReply, stream=True, error=MessageErrorReply)
    add_post(app, api, f"{path}/count_tokens", count_message_tokens, CountReply, error=MessageErrorReply)


@releases_prefix
async def create_message(api: GenerationService, body: MessagesBody, request: Request) -> Response:
    """Generate a message in Anthropic's format, whole or as a stream of events."""
    chat_body = await _as_chat(body, request, budgets=api.parsers.reasoning is not None)
    chat = await prepare_chat(api, chat_body, request, id_prefix="msg")
    return await answer_call(api, chat.call, MessageEncoder(api, chat), request, stream=bool(body.stream))


@limit_long_bodies
async def count_message_tokens(api: GenerationService, body: CountBody, request: Request) -> Response:
    """Return the number of prompt tokens of a conversation."""
    model = await api.names.find(body.model, request, pools=False)
    check_template(body.chat_template, api.settings.api.trust_request_chat_template)
    chat_body = await _as_chat(body, request, budgets=False)
    prompt = await api.reader.read_chat(chat_body, model, limited=False)
    return json_response({"input_tokens": len(prompt.token_ids)})


async def _as_chat(body: CountBody, request: Request, *, budgets: bool) -> ChatBody:
    """Translate a /v1/messages body to a chat completion body, in a thread if it is long or of unknown
    length. `budgets`: whether the server can limit the number of reasoning tokens."""
    return await off_loop(num_body_bytes(request), lambda: as_chat(body, budgets=budgets))
