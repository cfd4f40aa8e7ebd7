"""The pages that are made from the code say what it says."""

import pytest
from reference_pages import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_fresh(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "run: python tests/arch/reference_pages.py"
