"""The engine under all parsers: scripts read text as if all of it were there, and wait where it is not."""

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

import msgspec

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
    reasoning_breaks: tuple[str, ...] = ()
    """What ends it too."""
    opened = False
    """Whether the answer begins inside of reasoning."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        """How much of the buffer was read."""
        self._held: int | None = None
        """Since where it may yet have to be given back as text."""
        self._kept: list[str] = []
        """What is held and no longer in the buffer, so that a long hold does not make the buffer long."""
        self._ended = False
        self._out: list[Piece] = []
        self._running: Wait[None] = self.script()

    def script(self) -> Wait[None]:
        """Read the answer from its first character to its last."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now that this text came."""
        if self._held is not None:
            self._kept.append(self._buffer[self._held : self._at])
            self._held = 0
        self._buffer, self._at = self._buffer[self._at :] + text, 0
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
        self._held, self._kept = self._at, []

    def release(self) -> None:
        self._held, self._kept = None, []

    def give_back(self) -> None:
        """What was read since `hold` was no call: it is text."""
        if self._held is not None:
            self.text("".join(self._kept) + self._buffer[self._held : self._at])
        self.release()

    def go_back(self) -> None:
        """Read again from where `hold` was."""
        if self._held is not None:
            self._at = self._held
        if self._kept:
            self._buffer, self._at = "".join(self._kept) + self._buffer[self._at :], 0
        self.release()

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
            start, mark = self._certain(marks, _MAX_HEADER)
            if start - self._at > _MAX_HEADER:
                return None
            if mark:
                text = self._buffer[self._at : start]
                self._at = start
                return text
            if not (yield from self.more()):
                return None

    def _certain(self, marks: tuple[str, ...], within: int | None = None) -> tuple[int, str]:
        """Where the first mark is, and which; if there is none, how far the text is certain to have none.

        `within`: how many characters before a mark are of interest."""
        longest, firsts, pattern = _shape(marks)
        size = len(self._buffer)
        end = size if within is None else self._at + within + longest
        found = pattern.search(self._buffer, self._at, end)
        tail = max(self._at, size - longest + 1)
        partial = size if self._ended else _partial(self._buffer, tail, marks, firsts)
        return (found.start(), found[0]) if found and found.start() < partial else (partial, "")


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces of one kind that follow each other, as one; none that is empty."""
    out: list[Piece] = []
    parts: list[str] = []
    for piece in pieces:
        if isinstance(piece, ToolStart):
            _close(out, parts)
            out.append(piece)
        elif piece.text:
            if not parts or _kind(out[-1]) != _kind(piece):
                _close(out, parts)
                out.append(piece)
            parts.append(piece.text)
    _close(out, parts)
    return out


def _close(out: list[Piece], parts: list[str]) -> None:
    """The last piece gets all of its parts."""
    if len(parts) > 1:
        out[-1] = msgspec.structs.replace(out[-1], text="".join(parts))
    parts.clear()


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    return type(piece), piece.index if isinstance(piece, ToolArguments) else 0


def _partial(text: str, at: int, marks: tuple[str, ...], firsts: frozenset[str]) -> int:
    """Where an end of the text begins that may become a mark."""
    for start in range(at, len(text)):
        if text[start] in firsts:
            tail = text[start:]
            if any(len(tail) < len(mark) and mark.startswith(tail) for mark in marks):
                return start
    return len(text)


@lru_cache(maxsize=1024)
def _shape(marks: tuple[str, ...]) -> tuple[int, frozenset[str], re.Pattern[str]]:
    """The length of the longest mark, what marks begin with, and what finds the first of them: the longest of
    those that begin there."""
    by_length = sorted(marks, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
    return max(map(len, marks), default=1), frozenset(mark[0] for mark in marks), pattern
