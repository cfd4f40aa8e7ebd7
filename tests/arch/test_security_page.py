"""Tests that the pages on security name existing tests."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECURITY = ROOT / "tests" / "security"


@pytest.mark.parametrize("page", ["security.md", "evidence/security.md"])
def test_named_tests_exist(page: str) -> None:
    """Catches a renamed test, and a test of another folder that has no path."""
    names = re.findall(r"`([\w/]*test_\w+\.py)`", (ROOT / "docs" / page).read_text())
    files = {name: ROOT / name if name.startswith("tests/") else SECURITY / name for name in names}
    assert len(files) > 20
    assert [name for name, file in files.items() if not file.is_file()] == []


def test_every_security_test_is_on_the_page() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    assert [file.name for file in SECURITY.glob("test_*.py") if f"`{file.name}`" not in text] == []
