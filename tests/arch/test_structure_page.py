"""Tests that docs/structure.md describes the existing files, by their docstrings."""

from structure_page import PAGE, ROOT, page, summary


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: PYTHONPATH=src python tests/arch/structure_page.py"


def test_every_file_has_a_docstring() -> None:
    silent = [str(path) for path in ROOT.rglob("*.py") if path.name != "__init__.py" and not summary(path)]
    assert not silent
