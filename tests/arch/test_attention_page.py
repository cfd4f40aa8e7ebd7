"""Tests that docs/attention_backends.md shows the results of the backends' checks."""

from attention_page import PAGE, page


def test_the_page_of_attention_backends_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run: python tests/arch/attention_page.py > docs/attention_backends.md"
