"""The route /v1/chat/completions, and the preparation of chats for the routes of all APIs."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from quire.server.openai.api_call import new_call
from quire.server.openai.chat_encoder import ChatEncoder
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.requests import MAX_STOP_STRINGS, ChatBody
from quire.server.openai.run_call import answer_call
from quire.server.openai.sampling_params import chat_params, check_chat
from quire.server.openai.service import GenerationService, releases_prefix
from quire.server.openai.tools import read_tools
from quire.server.openai.work_size import num_chars, off_loop, params_size

_MAX_STOPS = {"msg": 64}
"""Maximum number of stop strings of APIs that allow more than `MAX_STOP_STRINGS`, by the prefix of their
request ids (`msg`: /v1/messages)."""


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
    tools_chars, params_chars = num_chars([body.tools, body.response_format]), params_size(body)
    tools, constraint, is_constrained = await off_loop(
        tools_chars, lambda: read_tools(body, parsers, model.tokenizer)
    )
    variables = api.reader.variables(body)
    wait = partial(api.running_requests.until_disconnect, request.receive)
    prompt = await api.reader.read_chat(body, model, body.num_requested or 1, wait, variables=variables)
    format = parsers.answer_format(
        body, tools, prompt, model.tokenizer, variables, unconstrained=not is_constrained
    )
    params = await off_loop(params_chars, lambda: chat_params(body, model, prompt, constraint, format))
    call = new_call(api, id_prefix, body, request, model, [prompt], [params])
    last = body.messages[-1]
    role = settings.response_role if body.add_generation_prompt else last.role
    echoed = last.text if body.echo and last.role == role else ""
    return ChatRequest(body, call, role, echoed, tools, format)
