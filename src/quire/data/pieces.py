"""Neutral pieces of an answer: what parsers make of its text, and what the encoder of each API consumes."""

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class ToolStart(msgspec.Struct, frozen=True):
    """A tool call begins; `index` counts the calls of the answer."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """The next part of a call's arguments, in JSON."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | ToolStart | ToolArguments
