"""The base of all parsers: a generator, the script, reads output text and yields when it needs more."""

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

import msgspec

from quire.data.output_pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart

Result = TypeVar("Result")
Wait = Generator[None, None, Result]
"""Generator that reads a part of an output: it yields when it needs more text, and returns its result. Parser
methods run each other with `yield from`."""
Emit = Callable[[str], None]

_MAX_HEADER = 512
"""Maximum length in characters of a header, such as a function's name or a key before its value."""


class Parser:
    """Splits the text of one output, which arrives in arbitrary chunks, into pieces: text, reasoning and tool
    calls. Subclasses implement `script`, a generator that reads the text and yields when it needs more."""

    keeps_special_tokens = False
    """Whether tool calls or reasoning are marked by special tokens, which the text must then include."""
    reads_all = False
    """Whether the parser handles both reasoning and tool calls, so that no other parser is needed."""
    reasoning_marks: tuple[str, str] | None = None
    """Texts that mark the start and end of reasoning, for code that works on tokens."""
    reasoning_breaks: tuple[str, ...] = ()
    """Other texts that end reasoning, such as the mark of a tool call."""
    opened = False
    """Whether the output begins inside of reasoning."""

    def __init__(self) -> None:
        self._buffer = ""
        self._position = 0
        """Position in the buffer up to which the parser has read."""
        self._hold_start: int | None = None
        """Position of held text in the buffer, which was read but may be emitted as text; None: none is
        held."""
        self._held_text: list[str] = []
        """Held text that is no longer in the buffer, so that the buffer stays short."""
        self._ended = False
        self._out: list[Piece] = []
        self._running: Wait[None] = self.script()

    def script(self) -> Wait[None]:
        """Read the whole output and emit its pieces: text, reasoning and tool calls."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Piece]:
        """Add output text, and return the pieces (text, reasoning, tool calls) that are certain now."""
        if self._hold_start is not None:
            self._held_text.append(self._buffer[self._hold_start : self._position])
            self._hold_start = 0
        self._buffer, self._position = self._buffer[self._position :] + text, 0
        return self._advance()

    def end(self) -> list[Piece]:
        """Return the remaining pieces at the end of the output."""
        self._ended = True
        return self._advance()

    def parse(self, text: str) -> list[Piece]:
        """Return the pieces of a whole output: text, reasoning and tool calls."""
        return join(self.feed(text) + self.end())

    def _advance(self) -> list[Piece]:
        next(self._running, None)
        out, self._out = self._out, []
        return join(out)

    # ---- output of scripts

    def text(self, text: str) -> None:
        self._out.append(TextPiece(text))

    def reasoning(self, text: str) -> None:
        self._out.append(ReasoningPiece(text))

    # ---- input of scripts

    def hold(self) -> None:
        """Hold the text that is read from here on, since it may turn out to be no call, and be emitted."""
        self._hold_start, self._held_text = self._position, []

    def release(self) -> None:
        self._hold_start, self._held_text = None, []

    def give_back(self) -> None:
        """Emit the text that was read since `hold` as text; it was no call."""
        if self._hold_start is not None:
            self.text("".join(self._held_text) + self._buffer[self._hold_start : self._position])
        self.release()

    def go_back(self) -> None:
        """Return to the position of `hold`, to read the text again."""
        if self._hold_start is not None:
            self._position = self._hold_start
        if self._held_text:
            self._buffer, self._position = "".join(self._held_text) + self._buffer[self._position :], 0
        self.release()

    def more(self) -> Wait[bool]:
        """Wait for more output text; return False if the output has ended."""
        if self._ended:
            return False
        yield
        return True

    def peek(self) -> Wait[str]:
        """Return the next character without reading it; empty at the end."""
        while self._position >= len(self._buffer):
            if not (yield from self.more()):
                return ""
        return self._buffer[self._position]

    def space(self) -> Wait[str]:
        """Skip white space and return the next character; empty at the end."""
        while (char := (yield from self.peek())).isspace():
            self._position += 1
        return char

    def word(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Read and return the characters up to the first that does not match the pattern."""
        chars: list[str] = []
        while pattern.match(char := (yield from self.peek())):
            chars.append(char)
            self._position += 1
        return "".join(chars)

    def take(self, *literals: str) -> Wait[str]:
        """Read the longest literal that comes next and return it; empty if no literal comes next."""
        if not literals:
            return ""
        while True:
            rest = self._buffer[self._position : self._position + max(map(len, literals))]
            if self._ended or not any(len(rest) < len(x) and x.startswith(rest) for x in literals):
                break
            yield
        literal = max((x for x in literals if rest.startswith(x)), key=len, default="")
        self._position += len(literal)
        return literal

    def comes(self, literal: str) -> Wait[str]:
        """Return the literal if it comes next, after white space or not, else an empty text; read nothing."""
        self.hold()
        yield from self.space()
        literal = yield from self.take(literal)
        self.go_back()
        return literal

    def until(self, marks: tuple[str, ...], emit: Emit) -> Wait[str]:
        """Pass the text before the first of these marks to `emit`, and return the mark, which is not read
        yet. Return an empty text if the output ends without a mark."""
        while True:
            start, mark = self._find_mark(marks)
            if start > self._position:
                emit(self._buffer[self._position : start])
                self._position = start
            if mark or not (yield from self.more()):
                return mark

    def header(self, *marks: str) -> Wait[str | None]:
        """Read and return the text before a mark. Return None and read nothing if no mark follows within
        `_MAX_HEADER` characters."""
        while True:
            start, mark = self._find_mark(marks, _MAX_HEADER)
            if start - self._position > _MAX_HEADER:
                return None
            if mark:
                text = self._buffer[self._position : start]
                self._position = start
                return text
            if not (yield from self.more()):
                return None

    def _find_mark(self, marks: tuple[str, ...], within: int | None = None) -> tuple[int, str]:
        """Return the position and text of the first of these marks. Without a mark, return the position up to
        which the buffer certainly has no mark, and an empty text. `within` is the maximum number of
        characters before the mark."""
        longest, firsts, pattern = _shape(marks)
        size = len(self._buffer)
        end = size if within is None else self._position + within + longest
        match = pattern.search(self._buffer, self._position, end)
        tail = max(self._position, size - longest + 1)
        partial = size if self._ended else _partial_mark(self._buffer, tail, marks, firsts)
        return (match.start(), match[0]) if match and match.start() < partial else (partial, "")


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """Join consecutive pieces of the same kind, and drop empty pieces."""
    out: list[Piece] = []
    parts: list[str] = []
    for piece in pieces:
        if isinstance(piece, ToolStart):
            _set_text(out, parts)
            out.append(piece)
        elif piece.text:
            if not parts or _kind(out[-1]) != _kind(piece):
                _set_text(out, parts)
                out.append(piece)
            parts.append(piece.text)
    _set_text(out, parts)
    return out


def _set_text(out: list[Piece], parts: list[str]) -> None:
    """Set the text of the last piece in `out` to the joined parts, and clear the parts."""
    if len(parts) > 1:
        out[-1] = msgspec.structs.replace(out[-1], text="".join(parts))
    parts.clear()


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    return type(piece), piece.index if isinstance(piece, ToolArguments) else 0


def _partial_mark(text: str, at: int, marks: tuple[str, ...], firsts: frozenset[str]) -> int:
    """Return the start of a suffix of the text that may become a mark, or the length of the text."""
    for start in range(at, len(text)):
        if text[start] in firsts:
            tail = text[start:]
            if any(len(tail) < len(mark) and mark.startswith(tail) for mark in marks):
                return start
    return len(text)


@lru_cache(maxsize=1024)
def _shape(marks: tuple[str, ...]) -> tuple[int, frozenset[str], re.Pattern[str]]:
    """Return the length of the longest mark, the first characters of marks, and a pattern that finds the
    first mark. Of several marks at one position, the pattern finds the longest."""
    by_length = sorted(marks, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
    return max(map(len, marks), default=1), frozenset(mark[0] for mark in marks), pattern
