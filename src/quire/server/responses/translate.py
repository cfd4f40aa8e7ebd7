"""Translation of a /v1/responses body to a chat completion body."""

from typing import Any

from pydantic import ValidationError

from quire.errors import RequestError
from quire.server.http.errors import as_request_error
from quire.server.openai.requests import ChatBody, GenerateBody
from quire.server.openai.sampling_params import unknown_fields
from quire.server.responses.bodies import ResponseBody
from quire.server.responses.items import Item, ItemMessages

_ALLOWED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "a response is one answer"),
    "echo": ((False,), "a response does not repeat its input"),
    "use_beam_search": ((False,), "use /v1/chat/completions for it"),
    "prompt_logprobs": ((), "use /v1/chat/completions for them"),
    "response_format": ((), "it is `text.format` here"),
    "conversation": ((), "use previous_response_id, or send all items"),
    "prompt": ((), "send the prompt itself as `instructions` and `input`"),
    "context_management": (([],), "shorten the input, or send truncation='auto'"),
    "moderation": ((), "this server does not moderate"),
}
"""Fields with the values that are allowed besides null, and the remedy for other values."""
_NOT_COPIED = ("stream", "stream_options", "request_id", *_ALLOWED_VALUES)
"""Fields that are not copied unchanged to the chat body."""
_SHARED = GenerateBody.model_fields.keys() - set(_NOT_COPIED) | {"parallel_tool_calls"}


def check_body(body: ResponseBody) -> None:
    if body.model_extra:
        unknown_fields.warn(body)
    for name, (allowed, instead) in _ALLOWED_VALUES.items():
        value = getattr(body, name)
        if value is not None and value not in allowed:
            raise RequestError(f"`{name}` is not supported in /v1/responses: {instead}", param=name)


def chat_of(body: ResponseBody, items: list[Item], *, stream: bool, request_id: str) -> ChatBody:
    """Return the chat completion body that generates the response. `stream`: return outputs token by
    token."""
    conversation = ItemMessages(body.instructions)
    conversation.add(items)
    messages = conversation.messages()
    if not messages:
        raise RequestError("`input` is empty: send a text or at least one item", param="input")
    fields = {name: getattr(body, name) for name in _SHARED if name in body.model_fields_set}
    extra = {n: v for n, v in (body.model_extra or {}).items() if n not in ChatBody.model_fields}
    tool_choice = _tool_choice(body)
    fields |= extra | {
        "messages": messages,
        "stream": stream,
        "request_id": body.request_id or request_id,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "tools": _tools(body),
        "tool_choice": tool_choice,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "chat_template": body.chat_template,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        fields["truncate_prompt_tokens"] = -1
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise as_request_error(error) from None


def _tools(body: ResponseBody) -> list[dict[str, Any]] | None:
    """Return the tools in the chat completion format, without those that allowed_tools excludes."""
    allowed = _allowed_tools(body)
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])]
    names = {tool["function"]["name"] for tool in tools}
    if allowed is not None and (unknown := sorted(allowed - names)):
        raise RequestError(
            f"tool_choice allows {', '.join(map(repr, unknown))}, not among `tools`", param="tool_choice"
        )
    return [tool for tool in tools if allowed is None or tool["function"]["name"] in allowed] or None


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(
            f"{path} is of type {kind!r:.80}; this server has no built-in tools; send functions",
            param="tools",
        )
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise RequestError(f"{path}.name must be a string", param="tools")
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _allowed_tools(body: ResponseBody) -> set[str] | None:
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    tools: Any = choice.get("tools")
    if not isinstance(tools, list) or not tools or not all(_is_named_function(tool) for tool in tools):
        raise RequestError(
            "tool_choice of type allowed_tools needs `tools`, a list of {type: function, name}",
            param="tool_choice",
        )
    return {tool["name"] for tool in tools}


def _is_named_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)


def _tool_choice(body: ResponseBody) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return None if choice == "auto" and not body.tools else choice
    if choice.get("type") == "allowed_tools":
        mode = choice.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise RequestError("tool_choice.mode must be auto or required", param="tool_choice")
        return str(mode)
    if not _is_named_function(choice):
        raise RequestError(
            f"tool_choice of type {choice.get('type')!r:.80} is not supported; known: none, auto, required, "
            "{type: function, name}, {type: allowed_tools, mode, tools}",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(body: ResponseBody) -> dict[str, Any] | None:
    text_format = body.text.format if body.text else None
    if text_format is None or text_format.get("type") == "text":
        return None
    if body.structured_outputs is not None:
        raise RequestError(
            "text.format and structured_outputs both constrain the output; send only one of them",
            param="text.format",
        )
    if text_format.get("type") == "json_object":
        return {"type": "json_object"}
    if text_format.get("type") != "json_schema":
        raise RequestError(
            f"text.format has no type {text_format.get('type')!r:.80}; known: text, json_object, json_schema",
            param="text.format",
        )
    if not isinstance(text_format.get("schema"), dict):
        raise RequestError("text.format of type json_schema needs `schema`, an object", param="text.format")
    names = ("name", "schema", "strict", "description")
    return {
        "type": "json_schema",
        "json_schema": {name: text_format[name] for name in names if name in text_format},
    }
