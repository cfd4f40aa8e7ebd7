"""Tests that the pictures of docs/ match the code and the tables, and that pages show existing ones."""

import re
from xml.etree import ElementTree

import pytest
from pictures import DOCS, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_current(name: str) -> None:
    drawn = PICTURES[name]()
    ElementTree.fromstring(drawn)
    assert (DOCS / name).read_text(encoding="utf-8") == drawn, "run: python tests/arch/pictures.py"


def test_every_picture_is_shown_and_exists() -> None:
    shown = {
        item for page in DOCS.glob("*.md") for item in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    }
    assert shown == {path.name for kind in ("svg", "png") for path in DOCS.glob(f"*.{kind}")}
