"""docs/models.md says what the tables say."""

from pathlib import Path

from models_page import page


def test_the_page_of_models_is_what_the_tables_make() -> None:
    """A family that was added, and nobody can read that it was."""
    written = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert written == page(), "run: python tests/arch/models_page.py > docs/models.md"
