"""Pieces of an answer as blocks of content: each is begun, grows and ends before the next."""

import json
import re
from typing import Any

from quire.data.pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart

Event = dict[str, Any]
_HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Of surrogates: no character, though JSON can spell it."""


class BlockEvents:
    """The blocks of one answer, as events. White space alone makes no block where others may follow."""

    def __init__(self, *, hold_space: bool) -> None:
        self.index = -1
        """Of the last block that was begun."""
        self.open = ""
        """The type of the block that grows; empty: none does."""
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
        """An answer has a block at least."""
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
    """The blocks that a client makes of the events."""
    found: list[dict[str, Any]] = []
    texts: dict[tuple[int, str], list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            found.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            (name, text) = list(event["delta"].items())[1]
            texts.setdefault((event["index"], name), []).append(text)
    for (index, name), parts in texts.items():
        text = "".join(parts)
        found[index] |= {"input": _object(text)} if name == "partial_json" else {name: text}
    return found


def _object(text: str) -> dict[str, Any]:
    """The input of a tool; of one that broke off, or that nobody could read, nothing is left."""
    try:
        found = json.loads(text)
        if "\\ud" in text.lower():
            found = json.loads(_HALF_PAIR.sub("\ufffd", json.dumps(found, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
