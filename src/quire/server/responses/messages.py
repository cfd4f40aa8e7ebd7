"""Items become the messages of a chat."""

from collections.abc import Iterable
from typing import Any

from quire.server.responses.items import Item

_AS_SYSTEM = ("system", "developer")


class Conversation:
    """The messages so far. Items of one answer, that chats have in one message, are put together."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        """Of the tools that were called, by the id of the call."""
        if instructions:
            self._add_system(instructions)

    def add(self, items: Iterable[Item]) -> None:
        for item in items:
            _ADDERS[item["type"]](self, item)

    def _add_message(self, item: Item) -> None:
        texts = [_text(part) for part in item["content"]]
        if item["role"] in _AS_SYSTEM:
            self._add_system("\n".join(texts))
        elif item["role"] == "assistant":
            self._answer("content")["content"] = _content(texts)
        else:
            self.messages.append({"role": "user", "content": _content(texts)})

    def _add_system(self, text: str) -> None:
        """Many templates know one system message, the first: those at the beginning are one."""
        if [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += "\n\n" + text
        else:
            self.messages.append({"role": "system", "content": text})

    def _add_reasoning(self, item: Item) -> None:
        parts = item["content"] or item["summary"]
        if texts := [part["text"] for part in parts]:
            answer = self._answer("content", "tool_calls")
            before = [answer["reasoning"]] if "reasoning" in answer else []
            answer["reasoning"] = "\n".join(before + texts)

    def _add_call(self, item: Item) -> None:
        if item["status"] == "incomplete":  # cut off in its arguments, and never made
            return
        self._names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def _add_output(self, item: Item) -> None:
        output, id = item["output"], item["call_id"]
        content = output if isinstance(output, str) else _content([_text(part) for part in output])
        message = {"role": "tool", "tool_call_id": id, "content": content}
        if id in self._names:
            message["name"] = self._names[id]
        self.messages.append(message)

    def _answer(self, *absent: str) -> dict[str, Any]:
        """The answer at the end, unless it has one of these already; then, or without one, a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in absent):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


_ADDERS = {
    "message": Conversation._add_message,
    "reasoning": Conversation._add_reasoning,
    "function_call": Conversation._add_call,
    "function_call_output": Conversation._add_output,
}


def _text(part: Item) -> str:
    found: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return found


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
