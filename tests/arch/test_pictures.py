"""The pictures of docs/ show what the code does and what tables say, and pages have those that they name."""

import re
from xml.etree import ElementTree

import pytest
from pictures import DOCS, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_fresh(name: str) -> None:
    drawn = PICTURES[name]()
    ElementTree.fromstring(drawn)
    assert (DOCS / name).read_text(encoding="utf-8") == drawn, "run: python tests/arch/pictures.py"


def test_every_picture_is_shown_and_none_is_missing() -> None:
    shown = {
        each for page in DOCS.glob("*.md") for each in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    }
    assert shown == {path.name for kind in ("svg", "png") for path in DOCS.glob(f"*.{kind}")}
