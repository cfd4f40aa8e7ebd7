"""What is said in an answer: its text in neutral pieces, as they come or gathered."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.data.outputs import CompletionOutput
from quire.data.pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.text.parsers import Chain
from quire.text.parsers.engine import Parser, join


class Listener:
    """Hears the outputs of one choice. Without a parser all that it hears is text."""

    def __init__(self, parser: Parser | Chain | None) -> None:
        self._parser = parser

    def hear(self, output: CompletionOutput) -> list[Piece]:
        """What is certain now; with the last output, all that waited for more."""
        if self._parser is None:
            return [TextPiece(output.text)] if output.text else []
        pieces = self._parser.feed(output.text)
        return pieces if output.finish_reason is None else join(pieces + self._parser.end())


@dataclass(slots=True)
class Call:
    """A tool that is called."""

    id: str
    name: str
    arguments: str = ""
    """In JSON."""


@dataclass(slots=True)
class Said:
    """A whole answer, by the kinds of its pieces."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def gathered(pieces: Iterable[Piece]) -> Said:
    said = Said()
    for piece in pieces:
        match piece:
            case TextPiece(text):
                said.text += text
            case ReasoningPiece(text):
                said.reasoning += text
            case ToolStart(_, id, name):
                said.calls.append(Call(id, name))
            case ToolArguments(index, text):
                said.calls[index].arguments += text
    return said
