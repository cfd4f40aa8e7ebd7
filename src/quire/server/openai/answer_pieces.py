"""Parsed output: text, reasoning and tool calls as API-neutral pieces, streamed or collected."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.data.outputs import CompletionOutput
from quire.data.params import ReasoningIds
from quire.data.pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.text.parsers import Chain
from quire.text.parsers.engine import Parser, join


class OutputParser:
    """Parser of the outputs of one choice. Without a text parser, all output is text."""

    def __init__(
        self,
        parser: Parser | Chain | None,
        *,
        reasoning: ReasoningIds | None = None,
        breaks: Iterable[tuple[int, ...]] = (),
        leaves_out_reasoning: bool = False,
        one_call: bool = False,
    ) -> None:
        """Initialize. `reasoning`: the tokens that mark it, for counting. `breaks`: other tokens that end
        it."""
        self._parser = parser
        self._reasoning, self._breaks = reasoning, tuple(breaks)
        self._token_ids: list[int] = []
        self._filters = leaves_out_reasoning or one_call
        self._leaves_out_reasoning, self._one_call = leaves_out_reasoning, one_call

    def hear(self, output: CompletionOutput) -> list[Piece]:
        """Return the pieces that are certain; the last output also returns all that was held back."""
        if self._reasoning is not None:
            self._token_ids += output.token_ids
        pieces = self.hear_text(output.text)
        if output.finish_reason is not None and self._parser is not None:
            pieces = join(pieces + self._filter(self._parser.end()))
        return pieces

    def hear_text(self, text: str) -> list[Piece]:
        """Parse the text of an output that is not the last, without its tokens."""
        if self._parser is None:
            return [TextPiece(text)] if text else []
        return self._filter(self._parser.feed(text))

    @property
    def num_reasoning(self) -> int:
        """Return the number of reasoning tokens so far."""
        if self._reasoning is None:
            return 0
        return count_reasoning(self._token_ids, self._reasoning, self._breaks)

    def _filter(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self._keeps(piece)] if self._filters else pieces

    def _keeps(self, piece: Piece) -> bool:
        match piece:
            case ReasoningPiece():
                return not self._leaves_out_reasoning
            case ToolStart(index=index) | ToolArguments(index=index):
                return index == 0 or not self._one_call
        return True


def count_reasoning(token_ids: list[int], marks: ReasoningIds, breaks: Iterable[tuple[int, ...]] = ()) -> int:
    """Count the tokens from the start mark to the end mark, or to the first of `breaks`."""
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
    """Return the index of the first occurrence of `part`, or None."""
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
    """A complete tool call."""

    id: str
    name: str
    arguments: str = ""
    """Arguments as JSON."""


@dataclass(slots=True)
class WholeAnswer:
    """A complete output, by the kinds of its pieces."""

    text: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)


def collect_pieces(pieces: Iterable[Piece]) -> WholeAnswer:
    """Collect the pieces of a complete output."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[CalledTool] = []
    for piece in pieces:
        match piece:
            case TextPiece(text):
                texts.append(text)
            case ReasoningPiece(text):
                reasoning.append(text)
            case ToolStart(_, id, name):
                calls.append(CalledTool(id, name))
            case ToolArguments(index, text):
                calls[index].arguments += text
    return WholeAnswer("".join(texts), "".join(reasoning), calls)
