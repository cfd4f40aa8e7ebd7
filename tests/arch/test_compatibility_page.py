"""docs/compatibility.md shows what the engine's own checks answer."""

from compatibility_page import PAGE, page


def test_the_page_of_compatibility_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/arch/compatibility_page.py"
