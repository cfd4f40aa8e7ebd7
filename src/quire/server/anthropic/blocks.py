"""Conversion of parsed pieces to content block events: a block starts, grows and stops before the next."""

import json
import re
from typing import Any

from quire.data.pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart

Event = dict[str, Any]
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate: JSON can contain it, but it is not a character."""


class BlockEvents:
    """The content blocks of one message, as events. White space alone starts no block if other blocks may
    follow."""

    def __init__(self, *, hold_space: bool) -> None:
        self.index = -1
        """Index of the last block that was started."""
        self.open = ""
        """Type of the open block; empty if none is open."""
        self.calls = False
        self._hold_space = hold_space
        self._space = ""

    def add(self, piece: Piece) -> list[Event]:
        match piece:
            case TextPiece(text):
                return self._text(text)
            case ReasoningPiece(text):
                events = self._begin("thinking", thinking="", signature="")
                return [*events, self._delta("thinking_delta", thinking=text)]
            case ToolStart(_, id, name):
                self.calls = True
                return [*self._close(), *self._begin("tool_use", id=id, name=name, input={})]
            case ToolArguments(_, text):
                return [self._delta("input_json_delta", partial_json=text)]

    def end(self) -> list[Event]:
        """Close the open block. A message has at least one block."""
        return [*([] if self.index >= 0 else self._begin("text", text="")), *self._close()]

    def _text(self, text: str) -> list[Event]:
        if self._hold_space and self.open != "text":
            text = self._space = self._space + text
            if text.isspace():
                return []
        events = self._begin("text", text="")
        return [*events, self._delta("text_delta", text=text)]

    def _begin(self, kind: str, **fields: Any) -> list[Event]:
        if self.open == kind:
            return []
        events = self._close()
        self.open = kind
        self.index += 1
        begun = {"type": kind, **fields}
        return [*events, {"type": "content_block_start", "index": self.index, "content_block": begun}]

    def _delta(self, kind: str, **fields: str) -> Event:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, **fields}}

    def _close(self) -> list[Event]:
        self._space = ""
        if not self.open:
            return []
        signed = [self._delta("signature_delta", signature="")] if self.open == "thinking" else []
        self.open = ""
        return [*signed, {"type": "content_block_stop", "index": self.index}]


def content_of(events: list[Event]) -> list[dict[str, Any]]:
    """Return the content blocks that the events describe."""
    blocks: list[dict[str, Any]] = []
    texts: dict[tuple[int, str], list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            (name, text) = list(event["delta"].items())[1]
            texts.setdefault((event["index"], name), []).append(text)
    for (index, name), parts in texts.items():
        text = "".join(parts)
        blocks[index] |= {"input": _parse_object(text)} if name == "partial_json" else {name: text}
    return blocks


def _parse_object(text: str) -> dict[str, Any]:
    """Return the input of a tool call, or {} if its JSON is incomplete or not an object."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            value = json.loads(_LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
