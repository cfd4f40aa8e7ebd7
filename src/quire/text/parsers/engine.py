"""The engine under all parsers: scripts read text as if all of it were there, and wait where it is not."""

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from quire.data.pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart

Result = TypeVar("Result")
Wait = Generator[None, None, Result]
"""A part of a script: it yields when it needs more text, and returns its result."""
Emit = Callable[[str], None]

_MAX_HEADER = 512
"""A name or a key is no longer than this, in characters; longer text is none."""


class Parser:
    """Turns the text of one answer, in whatever parts it comes, into pieces. Subclasses write `script`."""

    keeps_special_tokens = False
    """Whether the marks are special tokens of the vocabulary, so that the text must come with them."""
    reads_all = False
    """Whether it reads reasoning and tool calls both, so that no other parser goes with it."""
    reasoning_marks: tuple[str, str] | None = None
    """What reasoning begins and ends with, for those who look at tokens."""
    opened = False
    """Whether the answer begins inside of reasoning."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        """How much of the buffer was read."""
        self._held: int | None = None
        """Since where it may yet have to be given back as text."""
        self._ended = False
        self._out: list[Piece] = []
        self._running: Wait[None] = self.script()

    def script(self) -> Wait[None]:
        """Read the answer from its first character to its last."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now that this text came."""
        start = self._at if self._held is None else self._held
        self._buffer = self._buffer[start:] + text
        self._at -= start
        self._held = None if self._held is None else 0
        return self._advance()

    def end(self) -> list[Piece]:
        """The pieces that waited for text that did not come."""
        self._ended = True
        return self._advance()

    def parse(self, text: str) -> list[Piece]:
        """A whole answer."""
        return join(self.feed(text) + self.end())

    def _advance(self) -> list[Piece]:
        next(self._running, None)
        out, self._out = self._out, []
        return join(out)

    # What scripts write.

    def text(self, text: str) -> None:
        self._out.append(TextPiece(text))

    def reasoning(self, text: str) -> None:
        self._out.append(ReasoningPiece(text))

    # What scripts read with.

    def hold(self) -> None:
        """From here on, what is read may have to be given back."""
        self._held = self._at

    def release(self) -> None:
        self._held = None

    def give_back(self) -> None:
        """What was read since `hold` was no call: it is text."""
        if self._held is not None:
            self.text(self._buffer[self._held : self._at])
        self._held = None

    def go_back(self) -> None:
        """Read again from where `hold` was."""
        self._at, self._held = self._at if self._held is None else self._held, None

    def more(self) -> Wait[bool]:
        """Wait for more text; False if there is none."""
        if self._ended:
            return False
        yield
        return True

    def peek(self) -> Wait[str]:
        """The next character; none at the end."""
        while self._at >= len(self._buffer):
            if not (yield from self.more()):
                return ""
        return self._buffer[self._at]

    def space(self) -> Wait[str]:
        """Skip white space; returns the character behind it, none at the end."""
        while (char := (yield from self.peek())).isspace():
            self._at += 1
        return char

    def word(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Skip the characters that each match."""
        chars: list[str] = []
        while pattern.match(char := (yield from self.peek())):
            chars.append(char)
            self._at += 1
        return "".join(chars)

    def take(self, *literals: str) -> Wait[str]:
        """Skip the one of the literals that comes next, the longest of several; none if none does."""
        if not literals:
            return ""
        while True:
            rest = self._buffer[self._at : self._at + max(map(len, literals))]
            if self._ended or not any(len(rest) < len(one) and one.startswith(rest) for one in literals):
                break
            yield
        taken = max((one for one in literals if rest.startswith(one)), key=len, default="")
        self._at += len(taken)
        return taken

    def until(self, marks: tuple[str, ...], emit: Emit) -> Wait[str]:
        """Emit the text before the first of the marks, and stop there; returns the mark, none at the end."""
        while True:
            start, mark = self._certain(marks)
            if start > self._at:
                emit(self._buffer[self._at : start])
                self._at = start
            if mark or not (yield from self.more()):
                return mark

    def header(self, *marks: str) -> Wait[str | None]:
        """The short text before a mark, which comes next then; None, and nothing read, if there is none."""
        while True:
            start, mark = self._certain(marks)
            if start - self._at > _MAX_HEADER:
                return None
            if mark:
                text = self._buffer[self._at : start]
                self._at = start
                return text
            if not (yield from self.more()):
                return None

    def _certain(self, marks: tuple[str, ...]) -> tuple[int, str]:
        """Where the first mark is, and which; if there is none, how far the text is certain to have none."""
        found = _first(self._buffer, self._at, marks)
        partial = len(self._buffer) if self._ended else _partial(self._buffer, self._at, marks)
        return found if found is not None and found[0] < partial else (partial, "")


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces of one kind that follow each other, as one; none that is empty."""
    out: list[Piece] = []
    for piece in pieces:
        if not isinstance(piece, ToolStart) and not piece.text:
            continue
        joined = _joined(out[-1], piece) if out else None
        if joined is None:
            out.append(piece)
        else:
            out[-1] = joined
    return out


def _joined(first: Piece, second: Piece) -> Piece | None:
    match first, second:
        case TextPiece(text=before), TextPiece(text=after):
            return TextPiece(before + after)
        case ReasoningPiece(text=before), ReasoningPiece(text=after):
            return ReasoningPiece(before + after)
        case ToolArguments(index=index, text=before), ToolArguments(index=other, text=after):
            return ToolArguments(index, before + after) if index == other else None
    return None


def _first(text: str, at: int, marks: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first mark is, and which; the longest of those that begin there."""
    found = [(start, -len(mark), mark) for mark in marks if (start := text.find(mark, at)) >= 0]
    start, _, mark = min(found, default=(-1, 0, ""))
    return (start, mark) if found else None


def _partial(text: str, at: int, marks: tuple[str, ...]) -> int:
    """Where an end of the text begins that may become a mark."""
    longest, firsts = _shape(marks)
    for start in range(max(at, len(text) - longest + 1), len(text)):
        if text[start] in firsts:
            tail = text[start:]
            if any(len(tail) < len(mark) and mark.startswith(tail) for mark in marks):
                return start
    return len(text)


@lru_cache(maxsize=1024)
def _shape(marks: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """The length of the longest mark, and what marks begin with."""
    return max(map(len, marks), default=1), frozenset(mark[0] for mark in marks)
