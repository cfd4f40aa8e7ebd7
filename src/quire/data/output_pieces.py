"""API-independent pieces of an answer, from the output parsers to the encoder of each API."""

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class ToolStart(msgspec.Struct, frozen=True):
    """Start of a tool call; `index` counts the calls of the answer."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """The next part of the JSON arguments of a call."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | ToolStart | ToolArguments
