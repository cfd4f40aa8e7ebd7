"""docs/structure.md describes the files that exist, in the words of their docstrings."""

from structure_page import PAGE, ROOT, page, summary


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: PYTHONPATH=src python tests/arch/structure_page.py"


def test_every_file_says_what_it_is() -> None:
    silent = [str(path) for path in ROOT.rglob("*.py") if path.name != "__init__.py" and not summary(path)]
    assert not silent
