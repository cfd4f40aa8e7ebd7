"""Tests that the commands of docs/supported_models.md are valid, and that their architectures and parsers
exist."""

import re
import shlex
from pathlib import Path

from quire.checkpoint.families import ALIASES, FAMILIES
from quire.checkpoint.multimodal import MEDIA_FAMILIES
from quire.config.cli import FlagParser
from quire.entrypoints.serve import add_flags
from quire.text.parsers import REASONING, TOOLS

PAGE = Path(__file__).parents[2] / "docs" / "supported_models.md"
_COMMAND = re.compile(r"`quire serve (\S+/[^`]*)`")


def rows() -> list[list[str]]:
    """Return the cells of every row that has a command."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if _COMMAND.search(line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_architecture_is_supported() -> None:
    known = FAMILIES.keys() | ALIASES.keys() | MEDIA_FAMILIES.keys()
    named = {row[1].strip("`") for row in rows()}
    assert len(named) > 60 and not named - known


def test_every_command_can_be_typed() -> None:
    parser = FlagParser(prog="quire serve")
    add_flags(parser)
    for row in rows():
        (command,) = _COMMAND.findall(" ".join(row))
        parser.parse_args(shlex.split(command))


def test_every_parser_exists() -> None:
    table: dict[str, list[str]] = {}
    for row in rows():
        if len(row) == 4 and "quire serve" in row[2]:
            table[row[0]] = re.findall(r"`(\w+)`", row[3])
    assert table
    for names in table.values():
        assert set(names[:1]) <= set(TOOLS) and set(names[1:]) <= set(REASONING), names
