"""Translation of a /v1/messages body to a chat completion body."""

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
from quire.server.http.errors import as_request_error
from quire.server.openai.requests import CacheControl, ChatBody
from quire.server.openai.sampling_params import unknown_fields

_COPIED_FIELDS = (
    "model", "truncate_prompt_tokens", "truncation_side", "priority", "request_id", "cache_salt",
    "chat_template", "max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "min_tokens", "ignore_eos", "stop_token_ids",
    "structured_outputs", "session_id", "vllm_xargs", "kv_transfer_params",
)  # fmt: skip
"""Fields that are copied unchanged."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ENABLES_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def as_chat(body: MessagesBody | CountBody, *, budgets: bool) -> ChatBody:
    """Return the chat completion body. `budgets`: whether the server can limit the number of reasoning
    tokens."""
    if body.model_extra:
        unknown_fields.warn(body)
    known = type(body).model_fields.keys() & body.model_fields_set
    fields = {name: getattr(body, name) for name in _COPIED_FIELDS if name in known}
    messages = _messages(body)
    if messages[-1]["role"] == "assistant" and messages[-1].get("content"):
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body, MessagesBody) and body.stop_sequences:
        fields["stop"] = body.stop_sequences
    if (control := _cache_control(body)) is not None:
        fields["cache_control"] = control
    thinking = body.thinking
    switch = {} if thinking is None else {"enable_thinking": _ENABLES_THINKING[thinking.type]}
    if kwargs := switch | (body.chat_template_kwargs or {}):
        fields["chat_template_kwargs"] = kwargs
    if thinking is not None and thinking.display == "omitted":
        fields["include_reasoning"] = False
    if budgets and thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
        fields["thinking_token_budget"] = thinking.budget_tokens
    try:
        return ChatBody.model_validate({**fields, **_tools(body), **_output(body), "messages": messages})
    except ValidationError as error:
        raise as_request_error(error) from None


def _cache_control(body: CountBody) -> dict[str, Any] | None:
    """Return the one `cache_control` for the whole prompt, with the longest `ttl` of the body and its blocks,
    or None."""
    contents = [turn.content for turn in body.messages] + [body.system, body.tools]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    parts = [part for block in blocks if isinstance(part := getattr(block, "content", None), list)]
    blocks += [block for part in parts for block in part]
    controls = [control for entry in (body, *blocks) if (control := getattr(entry, "cache_control", None))]
    ttls = {control.ttl for control in controls if isinstance(control, CacheControl)}
    return {"type": "ephemeral", "ttl": "1h" if "1h" in ttls else "5m"} if ttls else None


def _output(body: CountBody) -> dict[str, Any]:
    config, fields = body.output_config, dict[str, Any]()
    output_format = (config and config.format) or body.output_format
    if output_format is not None:
        schema = {"name": "output", "schema": output_format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    return fields


# ---- tools


def _tools(body: CountBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_tool(index, tool) for index, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is None or (not body.tools and choice.type in ("auto", "none")):
        return fields
    if choice.type != "tool":
        fields["tool_choice"] = _CHOICES[choice.type]
    elif choice.name is None:
        raise RequestError("tool_choice of type `tool` needs a `name`", param="tool_choice")
    else:
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(index: int, tool: MessageTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"tools[{index}] has type {tool.type!r:.80}: this server has no built-in tools; send tools "
            "with an `input_schema` and run them in the client",
            param="tools",
        )
    if tool.input_schema is None:
        raise RequestError(f"tools[{index}] needs an `input_schema`", param="tools")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


# ---- messages


def _messages(body: CountBody) -> list[dict[str, Any]]:
    """Return the messages of the chat. Reasoning is joined once at the end: there may be many blocks."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _chat_content(body.system)})
    for turn in body.messages:
        for message in _turn_messages(turn):
            if messages and message["role"] == messages[-1]["role"] in ("user", "assistant"):
                join_turns(messages[-1], message)
            else:
                messages.append(message)
    for message in messages:
        if "reasoning" in message:
            message["reasoning"] = "".join(message["reasoning"])
    return messages


def _turn_messages(turn: MessageBody) -> list[dict[str, Any]]:
    """Return the chat messages of a turn: each tool result becomes a separate message."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": turn.role, "content": []}
    for block in turn.content:
        match block:
            case TextBlock() | ImageBlock():
                message["content"].append(_part(block))
            case ThinkingBlock():
                message.setdefault("reasoning", []).append(block.thinking)
            case ToolUseBlock():
                message.setdefault("tool_calls", []).append(_call(block))
            case ToolResultBlock():
                results.append(_result(block))
            case OtherBlock():
                raise _unsupported(block)
            case RedactedBlock():
                pass
    return [*results, message] if len(message) > 2 or message["content"] or not results else results


def join_turns(message: dict[str, Any], next_message: dict[str, Any]) -> None:
    """Merge `next_message`, the next message of the same role, into `message` without copying its content."""
    if isinstance(message["content"], str):
        message["content"] = _parts(message["content"])
    message["content"].extend(_parts(next_message["content"]))
    for name in ("reasoning", "tool_calls"):
        if name in next_message:
            message.setdefault(name, []).extend(next_message[name])


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        for part in content:
            if isinstance(part, OtherBlock):
                raise _unsupported(part)
        content = _chat_content([part for part in content if isinstance(part, TextBlock | ImageBlock)])
    message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    return message | {"is_error": True} if block.is_error else message


def _chat_content(content: str | Sequence[TextBlock | ImageBlock]) -> Any:
    return content if isinstance(content, str) else [_part(block) for block in content]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data or ''}"
    return {"type": "image_url", "image_url": {"url": url}}


def _unsupported(block: OtherBlock) -> RequestError:
    return RequestError(
        f"content of type {block.type!r:.80} is not supported by this server; send text, image, tool_use, "
        "tool_result or thinking",
        param="messages",
    )
