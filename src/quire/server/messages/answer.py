"""/v1/messages and /v1/messages/count_tokens."""

import sys

from starlette.requests import Request
from starlette.responses import Response

from quire.server.asked import check_template
from quire.server.errors import json_response
from quire.server.generate import Api
from quire.server.messages.bodies import CountBody, MessagesBody
from quire.server.messages.encoder import MessageEncoder
from quire.server.messages.translate import as_chat
from quire.server.prompts import off_loop
from quire.server.requests import ChatBody
from quire.server.talk import begin_talk


async def answer_messages(api: Api, body: MessagesBody, request: Request) -> Response:
    asked = await _as_chat(body, request, budgets=api.parsers.reasoning is not None)
    talk = await begin_talk(api, asked, request, kind="msg")
    return await api.answer(talk.job, MessageEncoder(api, talk), request, stream=bool(body.stream))


async def count_tokens(api: Api, body: CountBody, request: Request) -> Response:
    await api.check_model(body.model, pools=False)
    check_template(body.chat_template, api.settings.api.trust_request_chat_template)
    prompt = await api.reader.count(await _as_chat(body, request, budgets=False))
    return json_response({"input_tokens": len(prompt.token_ids)})


async def _as_chat(body: CountBody, request: Request, *, budgets: bool) -> ChatBody:
    """In a thread if the body is long, or comes without its length."""
    num_bytes = int(request.headers.get("content-length", sys.maxsize))
    return await off_loop(num_bytes, lambda: as_chat(body, budgets=budgets))
