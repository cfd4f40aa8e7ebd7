"""Tests that docs/compatibility.md shows the results of the engine's own checks."""

from compatibility_page import PAGE, page


def test_compatibility_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/arch/compatibility_page.py"
