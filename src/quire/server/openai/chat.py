"""The route /v1/chat/completions, and the preparation of chats for the routes of all APIs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.inputs import Prompt
from quire.server.openai.answer_pieces import AnswerFormat, Parsers, ToolUse
from quire.server.openai.chat_encoder import ChatEncoder
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.requests import MAX_STOP_STRINGS, ChatBody, Message
from quire.server.openai.run_call import answer_call
from quire.server.openai.sampling_params import chat_params, check_chat, params_size
from quire.server.openai.service import GenerationService, releases_prefix
from quire.server.openai.tools import read_tools
from quire.server.openai.work_size import num_chars, off_loop
from quire.text.tokenizer import Tokenizer

_NUM_DECODED_TOKENS = 64
"""Number of last prompt tokens that are decoded if the prompt has no text, to detect an open reasoning
block."""
_MAX_STOPS = {"msg": 64}
"""Maximum number of stop strings of APIs that allow more than `MAX_STOP_STRINGS`, by the prefix of their
request ids (`msg`: /v1/messages)."""
_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Chat template variables that turn reasoning on and off."""


@releases_prefix
async def create_chat_completion(api: GenerationService, body: ChatBody, request: Request) -> Response:
    """Create a chat completion, as one response or as a stream of events."""
    chat = await prepare_chat(api, body, request)
    return await answer_call(api, chat.call, ChatEncoder(api, chat), request, stream=bool(body.stream))


async def prepare_chat(
    api: GenerationService, body: ChatBody, request: Request, id_prefix: str = "chatcmpl"
) -> ChatRequest:
    """Check a chat request and prepare its engine call; `id_prefix` is the prefix of the response's id."""
    settings, parsers = api.settings.api, api.parsers
    model = await api.names.find(body.model, request, pools=False)
    check_chat(body, settings, max_stops=_MAX_STOPS.get(id_prefix, MAX_STOP_STRINGS))
    size = num_chars([body.tools, body.response_format])
    tools, constraint, is_constrained = await off_loop(
        size, lambda: read_tools(body, parsers, model.tokenizer)
    )
    variables = api.reader.variables(body)
    wait = partial(api.running_requests.until_disconnect, request.receive)
    prompt = await api.reader.read_chat(body, model, body.num_requested or 1, wait, variables=variables)
    format = AnswerFormat()
    if model.tokenizer is not None and (parsers.reasoning is not None or tools.calls != "none"):
        format = _answer_format(
            parsers, body, tools, prompt, model.tokenizer, variables, unconstrained=not is_constrained
        )
    params = await off_loop(params_size(body), lambda: chat_params(body, model, prompt, constraint, format))
    call = api.new_call(id_prefix, body, request, model, [prompt], [params])
    last = body.messages[-1]
    role = settings.response_role if body.add_generation_prompt else last.role
    echoed = _text(last) if body.echo and last.role == role else ""
    return ChatRequest(body, call, role, echoed, tools, format)


def _text(message: Message) -> str:
    return message.content if isinstance(message.content, str) else ""


def _answer_format(
    parsers: Parsers,
    body: ChatBody,
    tools: ToolUse,
    prompt: Prompt,
    tokenizer: Tokenizer,
    variables: Mapping[str, Any],
    *,
    unconstrained: bool,
) -> AnswerFormat:
    """Return how to parse the output. `variables`: the variables of the chat template. `unconstrained`:
    whether the output has no structured output constraint."""
    text = prompt.text
    if text is None:
        text = tokenizer.decode(prompt.token_ids[-_NUM_DECODED_TOKENS:], skip_special_tokens=False)
    switches = [variables[name] for name in _THINKING_VARIABLES if isinstance(variables.get(name), bool)]
    return parsers.answer_format(
        text,
        tokenizer,
        tools,
        num_calls=sum(len(message.tool_calls or ()) for message in body.messages),
        enable_thinking=switches[0] if switches else None,
        unconstrained=unconstrained,
        continued_text=_text(body.messages[-1]) if body.continue_final_message else "",
    )
