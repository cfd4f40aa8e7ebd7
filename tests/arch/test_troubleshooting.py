"""Tests that the messages which docs/troubleshooting.md quotes are those of the code."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MIN_PIECE = 12
"""Minimum length of a piece of a message, between two values, that is looked up."""
NOT_OURS = ("Address already in use", "loading 62%")
"""Quoted texts that are not looked up: a message of the system, and an example with values."""
_ADJACENT = re.compile(r"""["']\s*\n\s*[rf]*["']""")
"""A pair of quotes in the source between which Python joins two strings."""


def strings() -> str:
    """Return the sources with adjacent strings joined."""
    files = ROOT.glob("src/quire/**/*.py")
    return "\n".join(_ADJACENT.sub("", path.read_text(encoding="utf-8")) for path in files)


def quoted() -> Iterator[str]:
    """Yield the messages of the page: its text blocks, and the first cells of its tables that are code."""
    page = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"^\| `([^`]{20,})` \|", page, re.MULTILINE)


def test_every_quoted_message_is_in_the_code() -> None:
    sources, missing, num_pieces = strings(), [], 0
    for message in quoted():
        for piece in re.split(r"\.\.\.|[;()]|: ", message):
            piece = piece.strip(" :,.")
            if len(piece) >= MIN_PIECE and not any(text in piece for text in NOT_OURS):
                num_pieces += 1
                missing += [f"{piece!r} of {message[:60]!r}"] if piece not in sources else []
    assert not missing, "\n".join(missing)
    assert num_pieces > 50
