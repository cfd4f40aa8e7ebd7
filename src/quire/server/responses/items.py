"""Items: what a conversation is made of. Those of a body are checked and made whole here."""

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from quire.errors import RequestError
from quire.server.http.errors import NotFound

Item = dict[str, Any]
Find = Callable[[str], Item | None]
"""An item of a stored response by its id."""

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Parts that are text, and the field that holds it."""
_MEDIA = ("input_image", "input_audio", "image_url", "audio_url", "video_url")
MAX_REFERENCES = 4
"""To one stored item, in one input."""
_STATUSES = ("completed", "incomplete", "in_progress")


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def read_items(given: str | list[dict[str, Any]], find: Find) -> list[Item]:
    """The items of a body's input, each with an id and with parts for its content."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    find = _Finding(find)
    return [_read(_Asked(item, f"input[{place}]"), find) for place, item in enumerate(given)]


class _Finding:
    """Finds the stored items of one body. A reference is a few bytes and its item may be megabytes, so that
    few references to one item are allowed."""

    def __init__(self, find: Find) -> None:
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


class _Asked:
    """An item as it was sent, and its place in the body for errors."""

    def __init__(self, item: Item, place: str) -> None:
        self.item, self.place = item, place

    def wrong(self, what: str) -> RequestError:
        return RequestError(f"{self.place}{what}", param="input")

    def text(self, name: str) -> str:
        found = self.item.get(name)
        if not isinstance(found, str):
            raise self.wrong(f".{name} must be a string, not {found!r:.80}")
        return found

    def list(self, name: str) -> list["_Asked"]:
        """A list of objects; null is none."""
        found = self.item.get(name)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self.wrong(f".{name} must be a list of objects, not {found!r:.80}")
        return [_Asked(each, f"{self.place}.{name}[{at}]") for at, each in enumerate(found)]

    def head(self, kind: str, prefix: str) -> Item:
        """What every item has."""
        id, status = self.item.get("id"), self.item.get("status")
        return {
            "id": id if isinstance(id, str) and id else new_id(prefix),
            "type": kind,
            "status": status if status in _STATUSES else "completed",
        }


def _read(asked: _Asked, find: Find) -> Item:
    kind = asked.item.get("type")
    if kind is None:
        kind = "item_reference" if asked.item.keys() <= {"id", "type"} else "message"
    if kind == "item_reference":
        found = find(asked.text("id"))
        if found is None:
            raise NotFound(f"{asked.place}: there is no stored item {asked.item['id']!r:.80}", param="input")
        return found
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join((*_READERS, "item_reference"))
        raise asked.wrong(f" is of type {kind!r:.80}, which is not supported; known: {known}")
    return _READERS[kind](asked)


def _message(asked: _Asked) -> Item:
    role = asked.item.get("role")
    if role not in _ROLES:
        raise asked.wrong(f".role must be one of {', '.join(_ROLES)}, not {role!r:.80}")
    content = asked.item.get("content")
    if isinstance(content, str):
        parts = [_text_part(content, of_answer=role == "assistant")]
    elif content is None:
        raise asked.wrong(".content is missing: send text or parts")
    else:
        parts = [_part(part, of_answer=role == "assistant") for part in asked.list("content")]
    return asked.head("message", "msg") | {"role": role, "content": parts}


def _part(asked: _Asked, *, of_answer: bool) -> Item:
    kind = asked.item.get("type")
    if kind in _MEDIA and not of_answer:
        return dict(asked.item)  # read with the messages of the chat
    if not isinstance(kind, str) or kind not in _TEXTS:
        known = ", ".join((*_TEXTS, *_MEDIA))
        raise asked.wrong(f" is of type {kind!r:.80}, which is not supported; known: {known}")
    text = asked.text(_TEXTS[kind])
    return {"type": "refusal", "refusal": text} if kind == "refusal" else _text_part(text, of_answer)


def _text_part(text: str, of_answer: bool) -> Item:
    if of_answer:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _call(asked: _Asked) -> Item:
    names = ("call_id", "name", "arguments")
    return asked.head("function_call", "fc") | {name: asked.text(name) for name in names}


def _call_output(asked: _Asked) -> Item:
    output = asked.item.get("output")
    if isinstance(output, list):
        output = [_part(part, of_answer=False) for part in asked.list("output")]
    else:
        output = asked.text("output")
    return asked.head("function_call_output", "fco") | {"call_id": asked.text("call_id"), "output": output}


def _reasoning(asked: _Asked) -> Item:
    parts = {
        name: [{"type": kind, "text": part.text("text")} for part in asked.list(name)]
        for name, kind in (("summary", "summary_text"), ("content", "reasoning_text"))
    }
    return asked.head("reasoning", "rs") | parts


_READERS: dict[str, Callable[[_Asked], Item]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}
