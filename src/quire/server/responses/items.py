"""Responses API items: validation of the items of a request, and their conversion to chat messages."""

import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from quire.errors import RequestError
from quire.server.http.errors import NotFound

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]
"""Function (item id) -> item of a stored response, or None."""

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Field that holds the text of a content part, by type of the part."""
_MEDIA = ("input_image", "input_audio", "image_url", "audio_url", "video_url")
MAX_REFERENCES = 4
"""Maximum number of references to one stored item in one input."""
_STATUSES = ("completed", "incomplete", "in_progress")


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def read_items(input: str | list[dict[str, Any]], find: FindItem) -> list[Item]:
    """Return the items of a request's `input`, each with an id and with its content as parts."""
    if isinstance(input, str):
        input = [{"role": "user", "content": input}]
    find = _ItemFinder(find)
    return [_read_item(_InputItem(item, f"input[{index}]"), find) for index, item in enumerate(input)]


class _ItemFinder:
    """Finds the stored items that one request references by id. The number of references to one item is
    limited, since a few bytes of reference may add megabytes to the prompt."""

    def __init__(self, find: FindItem) -> None:
        self._find = find
        self._counts: Counter[str] = Counter()

    def __call__(self, id: str) -> Item | None:
        self._counts[id] += 1
        if self._counts[id] > MAX_REFERENCES:
            raise RequestError(
                f"the stored item {id!r:.80} may be referenced at most {MAX_REFERENCES} times in one input; "
                "remove the repeats",
                param="input",
            )
        return self._find(id)


class _InputItem:
    """An item of a request's `input` before validation, with its path in the body for errors."""

    def __init__(self, item: Item, path: str) -> None:
        self.item, self.path = item, path

    def error(self, what: str) -> RequestError:
        return RequestError(f"{self.path}{what}", param="input")

    def text(self, name: str) -> str:
        value = self.item.get(name)
        if not isinstance(value, str):
            raise self.error(f".{name} must be a string, not {value!r:.80}")
        return value

    def list(self, name: str) -> list["_InputItem"]:
        """Return the objects in the list field `name`; none if the field is missing or null. Raise
        RequestError for any other value."""
        value = self.item.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.error(f".{name} must be a list of objects, not {value!r:.80}")
        return [_InputItem(entry, f"{self.path}.{name}[{i}]") for i, entry in enumerate(value)]

    def base_fields(self, kind: str, prefix: str) -> Item:
        id, status = self.item.get("id"), self.item.get("status")
        return {
            "id": id if isinstance(id, str) and id else new_id(prefix),
            "type": kind,
            "status": status if status in _STATUSES else "completed",
        }


def _read_item(source: _InputItem, find: FindItem) -> Item:
    kind = source.item.get("type")
    if kind is None:
        kind = "item_reference" if source.item.keys() <= {"id", "type"} else "message"
    if kind == "item_reference":
        item = find(source.text("id"))
        if item is None:
            raise NotFound(f"{source.path}: there is no stored item {source.item['id']!r:.80}", param="input")
        return item
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join((*_READERS, "item_reference"))
        raise source.error(f" is of type {kind!r:.80}, which is not supported; known: {known}")
    return _READERS[kind](source)


def _read_message(source: _InputItem) -> Item:
    role = source.item.get("role")
    if role not in _ROLES:
        raise source.error(f".role must be one of {', '.join(_ROLES)}, not {role!r:.80}")
    content = source.item.get("content")
    if isinstance(content, str):
        parts = [_text_part(content, of_answer=role == "assistant")]
    elif content is None:
        raise source.error(".content is missing: send text or parts")
    else:
        parts = [_read_part(part, of_answer=role == "assistant") for part in source.list("content")]
    return source.base_fields("message", "msg") | {"role": role, "content": parts}


def _read_part(source: _InputItem, *, of_answer: bool) -> Item:
    kind = source.item.get("type")
    if kind in _MEDIA and not of_answer:
        return dict(source.item)  # validated later as part of the chat messages
    if not isinstance(kind, str) or kind not in _TEXT_FIELDS:
        known = ", ".join((*_TEXT_FIELDS, *_MEDIA))
        raise source.error(f" is of type {kind!r:.80}, which is not supported; known: {known}")
    text = source.text(_TEXT_FIELDS[kind])
    return {"type": "refusal", "refusal": text} if kind == "refusal" else _text_part(text, of_answer)


def _text_part(text: str, of_answer: bool) -> Item:
    if of_answer:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _read_call(source: _InputItem) -> Item:
    names = ("call_id", "name", "arguments")
    return source.base_fields("function_call", "fc") | {name: source.text(name) for name in names}


def _read_call_output(source: _InputItem) -> Item:
    output = source.item.get("output")
    if isinstance(output, list):
        output = [_read_part(part, of_answer=False) for part in source.list("output")]
    else:
        output = source.text("output")
    return source.base_fields("function_call_output", "fco") | {
        "call_id": source.text("call_id"),
        "output": output,
    }


def _read_reasoning(source: _InputItem) -> Item:
    parts = {
        name: [{"type": kind, "text": part.text("text")} for part in source.list(name)]
        for name, kind in (("summary", "summary_text"), ("content", "reasoning_text"))
    }
    return source.base_fields("reasoning", "rs") | parts


_READERS: dict[str, Callable[[_InputItem], Item]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "reasoning": _read_reasoning,
}


_SYSTEM_ROLES = ("system", "developer")


class ItemMessages:
    """Builder of chat messages from Responses API items. Items that belong to one assistant turn are merged
    into one message."""

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[dict[str, Any]] = []
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
        return [_join_texts(message) for message in self._messages]

    def _add_message(self, item: Item) -> None:
        content = _chat_content(item["content"])
        if item["role"] in _SYSTEM_ROLES:
            self._add_system("\n".join(_text(part) for part in item["content"]))
        elif item["role"] == "assistant":
            self._assistant_message("content")["content"] = content
        else:
            self._messages.append({"role": "user", "content": content})

    def _add_system(self, text: str) -> None:
        """Append a system message. Many templates accept only one system message, at the start, so several
        at the start are merged."""
        if len(self._messages) == 1 and self._messages[0]["role"] == "system":
            self._messages[0]["content"].append(text)
        else:
            self._messages.append({"role": "system", "content": [text]})

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
        self._messages.append(message)

    def _assistant_message(self, *absent: str) -> dict[str, Any]:
        """Return the last message if it is an assistant message without the fields in `absent`; otherwise
        append a new assistant message and return that."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or any(name in last for name in absent):
            last = {"role": "assistant"}
            self._messages.append(last)
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
