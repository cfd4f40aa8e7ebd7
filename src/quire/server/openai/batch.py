"""The routes /v1/chat/completions/batch, for several conversations in one call, and /invocations, for any
body (SageMaker)."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.http.errors import json_response
from quire.server.openai.chat import create_chat_completion, prepare_chat
from quire.server.openai.chat_encoder import ChatEncoder
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.completions import create_completion
from quire.server.openai.requests import ChatBody, CompletionBody
from quire.server.openai.run_call import final_outputs
from quire.server.openai.service import GenerationService
from quire.server.pooling.bodies import (
    EmbeddingChatBody,
    EmbeddingInput,
    InputBody,
    PoolingChatBody,
    PoolingChatRequest,
    PoolingInputBody,
    RerankBody,
    ScoreBody,
)
from quire.server.pooling.routes import (
    create_classes,
    create_embeddings,
    create_pooling,
    create_rerank,
    create_score,
)
from quire.server.tokens.bodies import ChatBatchBody

_NOT_IN_BATCHES: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "tools": (None,),
    "use_beam_search": (None, False),
    "n": (None, 1),
}
"""Fields that a batch does not support, with the values that disable them."""


async def create_chat_batch(api: GenerationService, body: ChatBatchBody, request: Request) -> Response:
    """Answer several conversations, each as one choice."""
    for name, disabled_values in _NOT_IN_BATCHES.items():
        if getattr(body, name) not in disabled_values:
            raise RequestError(f"`{name}` is not supported in a batch of chats; leave it out", param=name)
    api.check_count(len(body.messages), "conversations", param="messages")
    chats, answers, pause = list[ChatRequest](), list[dict[str, Any]](), api.pauses()
    for messages in body.messages:
        chats.append(await prepare_chat(api, body.model_copy(update={"messages": messages}), request))
        await pause.if_due()
    prompts = [prompt for chat in chats for prompt in chat.call.prompts]
    params = [item for chat in chats for item in chat.call.params]
    call = dataclasses.replace(chats[0].call, prompts=prompts, params=params)
    outputs = await api.running_requests.until_disconnect(request.receive, final_outputs(api, call))
    for chat, output in zip(chats, outputs, strict=True):
        answers.append(ChatEncoder(api, chat).response_body([output]))
        await pause.if_due()
    choices = [answer["choices"][0] | {"index": index} for index, answer in enumerate(answers)]
    usage = api.usage(
        call.num_prompt_tokens,
        sum(answer["usage"]["completion_tokens"] for answer in answers),
        sum(output.num_cached_tokens or 0 for output in outputs),
    )
    metrics = answers[0]["metrics"] if len(answers) == 1 else None
    return json_response(answers[0] | {"choices": choices, "usage": usage, "metrics": metrics})


BodyHandlers = dict[Any, Any]


def body_handlers(api: GenerationService) -> BodyHandlers:
    """Return the body classes that the model supports, with their handlers."""
    pooling = api.engine.inputs.pooling
    if pooling is None:
        return {ChatBody: create_chat_completion, CompletionBody: create_completion}
    first: BodyHandlers = {EmbeddingInput: create_embeddings, EmbeddingChatBody: create_embeddings}
    if pooling.task == "classify":
        first = {InputBody: create_classes, PoolingChatBody: create_classes}
    elif "embed" not in pooling.tasks:
        first = {}
    rest: BodyHandlers = {ScoreBody: create_score, RerankBody: create_rerank}
    if pooling.head:  # a token-level head has no score or embedding of the whole input
        first = rest = {}
    return first | rest | {PoolingInputBody: create_pooling, PoolingChatRequest: create_pooling}
