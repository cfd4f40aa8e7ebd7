"""A body of /v1/messages as the ChatBody that says the same."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from quire.errors import RequestError
from quire.server.anthropic.bodies import (
    CountBody,
    ImageBlock,
    MessageBody,
    MessagesBody,
    MessageTool,
    OtherBlock,
    RedactedBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.server.http.errors import invalid
from quire.server.openai.requests import ChatBody

_SAME = (
    "model", "truncate_prompt_tokens", "truncation_side", "priority", "request_id", "cache_salt",
    "chat_template", "max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "min_tokens", "ignore_eos", "stop_token_ids",
    "structured_outputs",
)  # fmt: skip
"""Fields that mean the same in both."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def as_chat(body: MessagesBody | CountBody, *, budgets: bool) -> ChatBody:
    """`budgets`: whether the server can hold the model to a length of its thoughts."""
    known = type(body).model_fields.keys() & body.model_fields_set
    fields = {name: getattr(body, name) for name in _SAME if name in known}
    messages = _messages(body)
    if messages[-1]["role"] == "assistant" and messages[-1].get("content"):
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body, MessagesBody) and body.stop_sequences:
        fields["stop"] = body.stop_sequences
    if kwargs := _thinking(body) | (body.chat_template_kwargs or {}):
        fields["chat_template_kwargs"] = kwargs
    thinking = body.thinking
    if thinking is not None and thinking.display == "omitted":
        fields["include_reasoning"] = False
    if budgets and thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
        fields["thinking_token_budget"] = thinking.budget_tokens
    try:
        return ChatBody.model_validate({**fields, **_tools(body), **_output(body), "messages": messages})
    except ValidationError as error:
        raise invalid(error) from None


def _thinking(body: CountBody) -> dict[str, Any]:
    return {} if body.thinking is None else {"enable_thinking": _THINKS[body.thinking.type]}


def _output(body: CountBody) -> dict[str, Any]:
    config, found = body.output_config, dict[str, Any]()
    wanted = (config and config.format) or body.output_format
    if wanted is not None:
        found["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    if config is not None and config.effort is not None:
        found["reasoning_effort"] = config.effort
    return found


# ---- tools


def _tools(body: CountBody) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if body.tools:
        found["tools"] = [_tool(place, tool) for place, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is None or (not body.tools and choice.type in ("auto", "none")):
        return found
    if choice.type != "tool":
        found["tool_choice"] = _CHOICES[choice.type]
    elif choice.name is None:
        raise RequestError("tool_choice of type `tool` needs a `name`", param="tool_choice")
    else:
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _tool(place: int, tool: MessageTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"tools[{place}] has type {tool.type!r:.80}: this server runs no tools of its own; send tools "
            "with an `input_schema`, and run them",
            param="tools",
        )
    if tool.input_schema is None:
        raise RequestError(f"tools[{place}] needs an `input_schema`", param="tools")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


# ---- messages


def _messages(body: CountBody) -> list[dict[str, Any]]:
    """Thoughts are gathered before they are put together: a conversation may have very many."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": _content(body.system)})
    for turn in body.messages:
        for message in _turn(turn):
            if found and message["role"] == found[-1]["role"] in ("user", "assistant"):
                join_turns(found[-1], message)
            else:
                found.append(message)
    for message in found:
        if "reasoning" in message:
            message["reasoning"] = "".join(message["reasoning"])
    return found


def _turn(turn: MessageBody) -> list[dict[str, Any]]:
    """The messages that one turn is: the results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    found: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": turn.role, "content": []}
    for block in turn.content:
        match block:
            case TextBlock() | ImageBlock():
                own["content"].append(_part(block))
            case ThinkingBlock():
                own.setdefault("reasoning", []).append(block.thinking)
            case ToolUseBlock():
                own.setdefault("tool_calls", []).append(_call(block))
            case ToolResultBlock():
                found.append(_result(block))
            case OtherBlock():
                raise _unreadable(block)
            case RedactedBlock():
                pass
    return [*found, own] if len(own) > 2 or own["content"] or not found else found


def join_turns(message: dict[str, Any], more: dict[str, Any]) -> None:
    """Turns of one role in a row are one turn. What the first has is not copied."""
    if isinstance(message["content"], str):
        message["content"] = _parts(message["content"])
    message["content"].extend(_parts(more["content"]))
    for name in ("reasoning", "tool_calls"):
        if name in more:
            message.setdefault(name, []).extend(more[name])


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        for each in content:
            if isinstance(each, OtherBlock):
                raise _unreadable(each)
        content = _content([each for each in content if isinstance(each, TextBlock | ImageBlock)])
    found = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    return found | {"is_error": True} if block.is_error else found


def _content(given: str | Sequence[TextBlock | ImageBlock]) -> Any:
    return given if isinstance(given, str) else [_part(block) for block in given]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data or ''}"
    return {"type": "image_url", "image_url": {"url": url}}


def _unreadable(block: OtherBlock) -> RequestError:
    return RequestError(
        f"content of type {block.type!r:.80} cannot be read by this server; send text, image, tool_use, "
        "tool_result or thinking",
        param="messages",
    )
