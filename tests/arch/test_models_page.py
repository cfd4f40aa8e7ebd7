"""Tests that docs/models.md matches the tables."""

from pathlib import Path

from models_page import page


def test_models_page_is_current() -> None:
    """Catches a new family that is not documented."""
    written = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert written == page(), "run: python tests/arch/models_page.py > docs/models.md"
