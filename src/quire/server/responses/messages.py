"""Conversion of Responses API items to chat messages."""

from collections.abc import Iterable
from typing import Any

from quire.errors import RequestError
from quire.server.responses.items import Item

_SYSTEM_ROLES = ("system", "developer")


class ItemMessages:
    """The chat messages built so far. Items that belong to one assistant turn are merged into one message."""

    def __init__(self, instructions: str | None) -> None:
        self.growing: list[dict[str, Any]] = []
        """Messages under construction. Text of system messages and reasoning is a list of strings until
        `messages()` joins it, so that appending does not copy the text."""
        self._names: dict[str, str] = {}
        """Names of the called tools, by call id."""
        if instructions:
            self._add_system(instructions)

    def add(self, items: Iterable[Item]) -> None:
        for item in items:
            _ADDERS[item["type"]](self, item)

    def messages(self) -> list[dict[str, Any]]:
        return [_join_texts(message) for message in self.growing]

    def _add_message(self, item: Item) -> None:
        content = _chat_content(item["content"])
        if item["role"] in _SYSTEM_ROLES:
            self._add_system("\n".join(_text(part) for part in item["content"]))
        elif item["role"] == "assistant":
            self._assistant_message("content")["content"] = content
        else:
            self.growing.append({"role": "user", "content": content})

    def _add_system(self, text: str) -> None:
        """Append a system message. Many templates accept only a leading one, so those at the start are
        merged."""
        if len(self.growing) == 1 and self.growing[0]["role"] == "system":
            self.growing[0]["content"].append(text)
        else:
            self.growing.append({"role": "system", "content": [text]})

    def _add_reasoning(self, item: Item) -> None:
        parts = item["content"] or item["summary"]
        if texts := [part["text"] for part in parts]:
            self._assistant_message("content", "tool_calls").setdefault("reasoning", []).extend(texts)

    def _add_call(self, item: Item) -> None:
        if item["status"] == "incomplete":  # truncated within its arguments: the call was never made
            return
        self._names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls = self._assistant_message().setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def _add_output(self, item: Item) -> None:
        output, id = item["output"], item["call_id"]
        content = output if isinstance(output, str) else _chat_content(output)
        message = {"role": "tool", "tool_call_id": id, "content": content}
        if id in self._names:
            message["name"] = self._names[id]
        self.growing.append(message)

    def _assistant_message(self, *absent: str) -> dict[str, Any]:
        """Return the last assistant message, or a new one if it has a field in `absent` or there is none."""
        last = self.growing[-1] if self.growing else {}
        if last.get("role") != "assistant" or any(name in last for name in absent):
            last = {"role": "assistant"}
            self.growing.append(last)
        return last


_ADDERS = {
    "message": ItemMessages._add_message,
    "reasoning": ItemMessages._add_reasoning,
    "function_call": ItemMessages._add_call,
    "function_call_output": ItemMessages._add_output,
}


def _join_texts(message: dict[str, Any]) -> dict[str, Any]:
    joined = {}
    if message["role"] == "system":
        joined["content"] = "\n\n".join(message["content"])
    if "reasoning" in message:
        joined["reasoning"] = "\n".join(message["reasoning"])
    return message | joined


def _text(part: Item) -> str:
    if not _is_text(part):
        raise RequestError("system and developer messages may contain only text", param="input")
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def _chat_content(parts: list[Item]) -> str | list[Item]:
    """Return the content of a chat message: a string for a single text part, else a list of parts."""
    content = [{"type": "text", "text": _text(part)} if _is_text(part) else part for part in parts]
    return content[0]["text"] if len(content) == 1 and _is_text(parts[0]) else content


def _is_text(part: Item) -> bool:
    return part["type"] == "refusal" or "text" in part["type"]
