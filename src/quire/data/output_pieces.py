"""API-independent pieces of an answer, from the output parsers to the encoder of each API."""

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class ToolStart(msgspec.Struct, frozen=True):
    """Start of a tool call: the index of the call in the answer, its id, and the name of the function."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """The next part of the JSON text of the arguments of tool call number `index`."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | ToolStart | ToolArguments
