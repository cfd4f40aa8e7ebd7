"""The output items of a response: parsed pieces become reasoning, message and function_call items and their
stream events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.data.output_pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.server.responses.items import Item, new_id

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Names that the API uses for one type of output items: their ids, stream events and content parts."""

    prefix: str
    """Prefix of the ids of the items."""
    event: str
    """First part of the names of the events with the item's text, before `.delta` or `.done`."""
    part: str | None
    """Type of the content part that holds the text, or None if the item itself holds it."""


_KINDS = {
    "message": _Kind("msg", "response.output_text", "output_text"),
    "reasoning": _Kind("rs", "response.reasoning_text", "reasoning_text"),
    "function_call": _Kind("fc", "response.function_call_arguments", None),
}


@dataclass(slots=True)
class _OpenItem:
    """An item that is being generated."""

    type: str
    index: int
    fixed_fields: Item
    """Fields that do not change while the item grows."""
    id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = new_id(_KINDS[self.type].prefix)

    @property
    def position(self) -> Item:
        """Return the fields of a text event that identify the item and its content part: item id and
        indices."""
        position: Item = {"item_id": self.id, "output_index": self.index}
        return position | {"content_index": 0} if _KINDS[self.type].part else position

    def part(self) -> Item:
        text = "".join(self.texts)
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def as_dict(self, status: str, *, has_part: bool = True) -> Item:
        """Return the item in the API's format. `has_part`: whether its content part has begun."""
        item: Item = {"id": self.id, "type": self.type, "status": status} | self.fixed_fields
        if _KINDS[self.type].part:
            return item | {"content": [self.part()] if has_part else []}
        return item | {"arguments": "".join(self.texts)}


class ResponseItems:
    """The output items of a response; the last one may still be growing."""

    def __init__(self) -> None:
        self._done: list[Item] = []
        self._open: _OpenItem | None = None

    def as_list(self) -> list[Item]:
        """Return all items in the API's format."""
        return [*self._done, *([self._open.as_dict("in_progress")] if self._open else [])]

    @property
    def open_type(self) -> str | None:
        return None if self._open is None else self._open.type

    def add(self, piece: Piece, logprobs: Sequence[Item] = ()) -> Iterator[Event]:
        """Add a parsed piece of the output to the items and yield the stream events. `logprobs` are those of
        the tokens at the end of a text piece."""
        match piece:
            case TextPiece(text):
                yield from self.begin("message")
                self.add_logprobs(logprobs)
                for event in self._add_text(text):
                    yield event | {"logprobs": list(logprobs)}
            case ReasoningPiece(text):
                yield from self.begin("reasoning")
                yield from self._add_text(text)
            case ToolStart(_, id, name):
                yield from self.end("completed")
                yield from self.begin("function_call", call_id=id, name=name)
            case ToolArguments(_, text):
                yield from self._add_text(text)

    def begin(self, type: str, **fixed_fields: str) -> Iterator[Event]:
        """Begin an output item of this type, unless the open item has that type already, and yield the stream
        events. `fixed_fields`: item fields that do not change while the item grows."""
        if self._open is not None and self._open.type == type:
            return
        yield from self.end("completed")
        self._open = item = _OpenItem(type, len(self._done), _FIXED_FIELDS[type] | fixed_fields)
        added = item.as_dict("in_progress", has_part=False)
        yield {"type": "response.output_item.added", "output_index": item.index, "item": added}
        if _KINDS[type].part:
            yield {"type": "response.content_part.added", **item.position, "part": item.part()}

    def delta_head(self) -> Event:
        """Return a text delta event without the text."""
        assert self._open is not None
        event = {"type": f"{_KINDS[self._open.type].event}.delta", **self._open.position}
        return event | {"logprobs": []} if self._open.type == "message" else event

    def append(self, text: str) -> None:
        assert self._open is not None
        self._open.texts.append(text)

    def add_logprobs(self, entries: Sequence[Item]) -> None:
        assert self._open is not None
        self._open.logprobs += entries

    def _add_text(self, text: str) -> Iterator[Event]:
        if text:
            self.append(text)
            yield self.delta_head() | {"delta": text}

    def end(self, status: str) -> Iterator[Event]:
        """Close the open item, if there is one, with this status, and yield the stream events."""
        item, self._open = self._open, None
        if item is None:
            return
        ended = item.as_dict(status)
        self._done.append(ended)
        done: Event = {"type": f"{_KINDS[item.type].event}.done", **item.position}
        if item.type == "function_call":
            yield done | {"name": ended["name"], "arguments": ended["arguments"]}
        else:
            (part,) = ended["content"]
            logprobs = {"logprobs": part["logprobs"]} if item.type == "message" else {}
            yield done | {"text": part["text"]} | logprobs
            yield {"type": "response.content_part.done", **item.position, "part": part}
        yield {"type": "response.output_item.done", "output_index": item.index, "item": ended}


_FIXED_FIELDS: dict[str, Item] = {
    "message": {"role": "assistant"},
    "reasoning": {"summary": [], "encrypted_content": None},
    "function_call": {},
}
