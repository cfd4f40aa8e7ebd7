"""Tests that the worked examples of docs/add_*.md run as printed."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.attention.backend import BACKENDS
from quire.checkpoint.families import FAMILIES
from quire.checkpoint.quant import METHODS
from quire.models import MODELS
from quire.quant import SCHEMES

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/add_*.md"))
TABLES: list[dict[str, Any]] = [FAMILIES, METHODS, BACKENDS.entries, MODELS.entries, SCHEMES.entries]
_BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PATH = re.compile(r"`((?:src|tests)/[\w/.]+)`")


@pytest.fixture
def tables() -> Iterator[None]:
    """Restore the tables that an example adds a line to."""
    before = [dict(table) for table in TABLES]
    yield
    for table, entries in zip(TABLES, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_example_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict(_BLOCK.findall(page.read_text(encoding="utf-8")))
    module, script = files
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        runpy.run_path(script)
        assert Path(module).stem in sys.modules, "the engine has not used the example"
    finally:
        sys.modules.pop(Path(module).stem, None)


def test_there_are_three_pages_and_their_paths_exist() -> None:
    assert len(PAGES) == 3
    for page in PAGES:
        paths = _PATH.findall(page.read_text(encoding="utf-8"))
        assert paths and not [path for path in paths if not (ROOT / path).exists()]
