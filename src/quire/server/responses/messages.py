"""Items become the messages of a chat."""

from collections.abc import Iterable
from typing import Any

from quire.errors import RequestError
from quire.server.responses.items import Item

_AS_SYSTEM = ("system", "developer")


class ItemMessages:
    """The messages so far. Items of one answer, that chats have in one message, are put together."""

    def __init__(self, instructions: str | None) -> None:
        self.growing: list[dict[str, Any]] = []
        """Of system messages and of reasoning the texts are lists, which nobody copies for every item."""
        self._names: dict[str, str] = {}
        """Of the tools that were called, by the id of the call."""
        if instructions:
            self._add_system(instructions)

    def add(self, items: Iterable[Item]) -> None:
        for item in items:
            _ADDERS[item["type"]](self, item)

    def messages(self) -> list[dict[str, Any]]:
        return [_whole(message) for message in self.growing]

    def _add_message(self, item: Item) -> None:
        content = _content(item["content"])
        if item["role"] in _AS_SYSTEM:
            self._add_system("\n".join(_text(part) for part in item["content"]))
        elif item["role"] == "assistant":
            self._answer("content")["content"] = content
        else:
            self.growing.append({"role": "user", "content": content})

    def _add_system(self, text: str) -> None:
        """Many templates know one system message, the first: those at the beginning are one."""
        if len(self.growing) == 1 and self.growing[0]["role"] == "system":
            self.growing[0]["content"].append(text)
        else:
            self.growing.append({"role": "system", "content": [text]})

    def _add_reasoning(self, item: Item) -> None:
        parts = item["content"] or item["summary"]
        if texts := [part["text"] for part in parts]:
            self._answer("content", "tool_calls").setdefault("reasoning", []).extend(texts)

    def _add_call(self, item: Item) -> None:
        if item["status"] == "incomplete":  # cut off in its arguments, and never made
            return
        self._names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def _add_output(self, item: Item) -> None:
        output, id = item["output"], item["call_id"]
        content = output if isinstance(output, str) else _content(output)
        message = {"role": "tool", "tool_call_id": id, "content": content}
        if id in self._names:
            message["name"] = self._names[id]
        self.growing.append(message)

    def _answer(self, *absent: str) -> dict[str, Any]:
        """The answer at the end, unless it has one of these already; then, or without one, a new one."""
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


def _whole(message: dict[str, Any]) -> dict[str, Any]:
    whole = {}
    if message["role"] == "system":
        whole["content"] = "\n\n".join(message["content"])
    if "reasoning" in message:
        whole["reasoning"] = "\n".join(message["reasoning"])
    return message | whole


def _text(part: Item) -> str:
    if not _is_text(part):
        raise RequestError("messages of the system have text alone", param="input")
    found: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return found


def _content(parts: list[Item]) -> str | list[Item]:
    """Text where it is nothing else, or parts as chats have them."""
    found = [{"type": "text", "text": _text(part)} if _is_text(part) else part for part in parts]
    return found[0]["text"] if len(found) == 1 and _is_text(parts[0]) else found


def _is_text(part: Item) -> bool:
    return part["type"] == "refusal" or "text" in part["type"]
