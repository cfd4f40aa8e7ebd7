"""Tests that numbers and lists in the README, the changelog and the pages agree with the tables of the
code."""

import re
from pathlib import Path

import pytest
from schema_suite import cases
from test_ratchets import MAX_FILE_LINES, MAX_FUNCTION_LINES

from quire.checkpoint.multimodal import MEDIA_FAMILIES
from quire.checkpoint.quant import METHODS
from quire.cli import COMMANDS
from quire.models import MODELS
from quire.version import VLLM_VERSION

ROOT = Path(__file__).parents[2]


def number_in(page: str, before: str, after: str) -> int:
    """Return the number between two texts of a page."""
    match = re.search(rf"{before}([\d,]+){after}", (ROOT / page).read_text())
    assert match is not None, f"{page} has no number between {before!r} and {after!r}"
    return int(match[1].replace(",", ""))


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_number_of_architectures(page: str) -> None:
    """The pages state a lower bound, which may lag behind the tables by a tenth."""
    stated, count = number_in(page, "over ", " architectures"), len({*MODELS, *MEDIA_FAMILIES})
    assert stated <= count <= 1.1 * stated


@pytest.mark.parametrize("page", ["README.md", "docs/quantization.md"])
def test_every_quantization_method_is_named(page: str) -> None:
    text = (ROOT / page).read_text().lower()
    assert [method for method in [*METHODS, "gguf"] if method not in text] == []


def test_readme_has_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    rare = {"install-vllm-command", "save-sharded-state"}
    assert [name for name in {*COMMANDS} - rare if name.split()[-1] not in text] == []


@pytest.mark.parametrize(("page", "folder"), [("README.md", "docs/"), ("docs/index.md", "")])
def test_every_page_is_linked(page: str, folder: str) -> None:
    """The pages of docs/evidence are linked by those that quote them."""
    links = set(re.findall(rf"\({folder}(\w+\.md)", (ROOT / page).read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - links - {"index.md"} == set()


def test_other_numbers() -> None:
    assert number_in("CONTRIBUTING.md", "at most ", " lines") == MAX_FILE_LINES
    assert number_in("CONTRIBUTING.md", "a function at most ", r"\.") == MAX_FUNCTION_LINES
    for page in ("docs/testing.md", "docs/structured.md"):
        assert number_in(page, "", " schemas") == len(cases())


@pytest.mark.parametrize("page", ["docs/migration.md", "CHANGELOG.md", "README.md"])
def test_release_of_vllm(page: str) -> None:
    assert VLLM_VERSION in (ROOT / page).read_text()
