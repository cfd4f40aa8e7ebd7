"""What is said in an answer: its text in neutral pieces, as they come or gathered."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.data.outputs import CompletionOutput
from quire.data.params import ReasoningIds
from quire.data.pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.text.parsers import Chain
from quire.text.parsers.engine import Parser, join


class Listener:
    """Hears the outputs of one choice. Without a parser all that it hears is text."""

    def __init__(
        self,
        parser: Parser | Chain | None,
        *,
        reasoning: ReasoningIds | None = None,
        breaks: Iterable[tuple[int, ...]] = (),
        leaves_out_reasoning: bool = False,
        one_call: bool = False,
    ) -> None:
        """`reasoning`: how tokens mark it, so that they can be counted; `breaks`: what ends it too."""
        self._parser = parser
        self._reasoning, self._breaks = reasoning, tuple(breaks)
        self._token_ids: list[int] = []
        self._filters = leaves_out_reasoning or one_call
        self._leaves_out_reasoning, self._one_call = leaves_out_reasoning, one_call

    def hear(self, output: CompletionOutput) -> list[Piece]:
        """What is certain now; with the last output, all that waited for more."""
        if self._reasoning is not None:
            self._token_ids += output.token_ids
        pieces = self.hear_text(output.text)
        if output.finish_reason is not None and self._parser is not None:
            pieces = join(pieces + self._kept(self._parser.end()))
        return pieces

    def hear_text(self, text: str) -> list[Piece]:
        """The same, of an output that is not the last, without its tokens."""
        if self._parser is None:
            return [TextPiece(text)] if text else []
        return self._kept(self._parser.feed(text))

    @property
    def num_reasoning(self) -> int:
        """Tokens of reasoning so far."""
        if self._reasoning is None:
            return 0
        return count_reasoning(self._token_ids, self._reasoning, self._breaks)

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self._keeps(piece)] if self._filters else pieces

    def _keeps(self, piece: Piece) -> bool:
        match piece:
            case ReasoningPiece():
                return not self._leaves_out_reasoning
            case ToolStart(index=index) | ToolArguments(index=index):
                return index == 0 or not self._one_call
        return True


def count_reasoning(token_ids: list[int], marks: ReasoningIds, breaks: Iterable[tuple[int, ...]] = ()) -> int:
    """Tokens between the marks, or up to what breaks them off."""
    begins = find(token_ids, marks.start, 0)
    if marks.open:
        start = len(marks.start) if begins == 0 else 0
    elif begins is None:
        return 0
    else:
        start = begins + len(marks.start)
    ends = [find(token_ids, mark, start) for mark in (marks.end, *breaks)]
    return min((end for end in ends if end is not None), default=len(token_ids)) - start


def find(token_ids: list[int], part: tuple[int, ...], start: int) -> int | None:
    """Where a part begins; None if it does not come."""
    if not part:
        return start
    try:
        while tuple(token_ids[start : start + len(part)]) != part:
            start = token_ids.index(part[0], start + 1)
    except ValueError:
        return None
    return start


@dataclass(slots=True)
class CalledTool:
    """A tool that is called."""

    id: str
    name: str
    arguments: str = ""
    """In JSON."""


@dataclass(slots=True)
class WholeAnswer:
    """A whole answer, by the kinds of its pieces."""

    text: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)


def gathered(pieces: Iterable[Piece]) -> WholeAnswer:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[CalledTool] = []
    for piece in pieces:
        match piece:
            case TextPiece(text):
                texts.append(text)
            case ReasoningPiece(text):
                thoughts.append(text)
            case ToolStart(_, id, name):
                calls.append(CalledTool(id, name))
            case ToolArguments(index, text):
                calls[index].arguments += text
    return WholeAnswer("".join(texts), "".join(thoughts), calls)
