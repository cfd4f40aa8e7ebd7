"""The routes of Anthropic's API."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from quire.server.anthropic.answer import answer_messages, count_tokens
from quire.server.anthropic.bodies import (
    CountBody,
    CountReply,
    MessageErrorReply,
    MessageReply,
    MessagesBody,
)
from quire.server.http.document import BODY, CODES, replies_of
from quire.server.openai.service import GenerationService


def add_message_routes(app: FastAPI, api: GenerationService) -> None:

    @app.post(
        "/v1/messages", **replies_of(MessageReply, *CODES, stream=True, error=MessageErrorReply), **BODY
    )
    async def create_message(body: MessagesBody, request: Request) -> Response:
        """Generate a message in Anthropic's format, whole or as a stream of events."""
        return await answer_messages(api, body, request)

    @app.post("/v1/messages/count_tokens", **replies_of(CountReply, *CODES, error=MessageErrorReply), **BODY)
    async def count_message_tokens(body: CountBody, request: Request) -> Response:
        """Return the number of prompt tokens of a conversation."""
        async with api.long_work.place(request):
            return await count_tokens(api, body, request)
