"""Tests that generated pages match the code."""

import pytest
from reference_pages import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "run: python tests/arch/reference_pages.py"


def test_every_environment_variable_is_described() -> None:
    rows = [line for line in PAGES["environment.md"]().splitlines() if line.startswith("| `QUIRE_")]
    assert rows and not [row for row in rows if not row.rsplit("|", 2)[1].strip()]
