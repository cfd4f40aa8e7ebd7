"""The source files of src/quire and their syntax trees, parsed once for all tests of this folder."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "quire"
FILES = sorted(ROOT.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))
