"""Tests of parsers on long and hostile answers: the work is linear in the length, and the pieces are
complete."""

import re
from typing import Any

import pytest

from quire.data.output_pieces import Piece, TextPiece, ToolArguments
from quire.text.parsers import answer_parser
from quire.text.parsers import streaming as engine
from quire.text.parsers.streaming import join

CALL = '<tool_call>{"name": "f", "arguments": {"a": '
HOSTILE = {
    "a mark that nothing follows": ("muse_glimmer", "", "<|start|>"),
    "calls that are none": ("hermes", "", "<tool_call>x"),
    "marks of which most are absent": ("kimi_k2", "", "<|tool_call_begin|>"),
    "a list": ("hermes", CALL + "[", '1, "x", '),
    "brackets": ("hermes", CALL, "["),
    "digits": ("hermes", CALL, "1"),
    "a name": ("hermes", '<tool_call>{"name": "', "f"),
    "white space": ("hermes", "a", "\n"),
    "white space between marks that are dropped": ("ernie45", "a", " <response>"),
    "a quote that none closes": ("gemma4", "<|tool_call>call:f{a:", '\\"'),
    "a text that no mark opens": ("openai", "<|channel|>", "final"),
}
each_answer = pytest.mark.parametrize(("name", "before", "unit"), HOSTILE.values(), ids=list(HOSTILE))


class Counted(str):
    """A string that counts the characters that are copied from it."""

    num_copied = 0

    def __getitem__(self, index: Any) -> "Counted":
        part = Counted(super().__getitem__(index))
        Counted.num_copied += len(part)
        return part

    def __add__(self, other: str) -> "Counted":
        Counted.num_copied += len(self) + len(other)
        return Counted(super().__add__(other))

    def __radd__(self, other: str) -> "Counted":
        return Counted(other) + self


class CountedPattern:
    """A pattern that counts the characters that it searches."""

    num_searched = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
        match = self._pattern.search(text, start, end)
        CountedPattern.num_searched += (match.end() if match else min(end, len(text))) - start
        return match


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the characters that parsers search."""
    shape = engine._shape
    monkeypatch.setattr(engine, "_shape", lambda marks: (*shape(marks)[:2], CountedPattern(shape(marks)[2])))


def read(name: str, parts: list[str]) -> list[Piece]:
    one = answer_parser(tools=name, make_id=lambda index, function: str(index))
    return join([piece for part in parts for piece in one.feed(part)] + one.end())


@each_answer
@pytest.mark.parametrize("part_len", [None, 3])
@pytest.mark.usefixtures("counted")
def test_parsing_is_linear(name: str, before: str, unit: str, part_len: int | None) -> None:
    work = []
    for size in (5_000, 20_000):
        Counted.num_copied = CountedPattern.num_searched = 0
        text = before + unit * (size // len(unit))
        step = part_len or len(text)
        read(name, [Counted(text[start : start + step]) for start in range(0, len(text), step)])
        work.append(Counted.num_copied + CountedPattern.num_searched)
    assert work[1] < 6 * work[0]


@each_answer
def test_long_answer_is_independent_of_the_split(name: str, before: str, unit: str) -> None:
    text = f"{before}{unit * (4000 // len(unit))} end"
    whole = read(name, [text])
    for size in (1, 7, 2500):
        assert read(name, [text[start : start + size] for start in range(0, len(text), size)]) == whole
    assert len(whole) < 100


def test_long_held_text_is_returned_complete() -> None:
    text = '<tool_call>{"name": "' + "long " * 2000
    assert read("hermes", list(text)) == [TextPiece(text)]
    blank = "a" + "\n" * 5000 + "b" + " " * 5000
    assert read("hermes", list(blank)) == [TextPiece(blank)]


def test_too_long_number_is_refused() -> None:
    for size, whole in ((4300, True), (4301, False)):
        pieces = read("hermes", [CALL, "1" * size, "}}</tool_call>"])
        arguments = "".join(piece.text for piece in pieces if isinstance(piece, ToolArguments))
        assert arguments == ('{"a": ' + "1" * size + "}" if whole else '{"a": ')
