"""The source files of src/quire and their syntax trees, parsed once for all tests of this folder."""

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "quire"
FILES = sorted(ROOT.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def _parsed() -> dict[Path, list[ast.AST]]:
    """Return the nodes of every file. The garbage collector is off meanwhile and ignores them later: it would
    take longer than the parser."""
    gc.collect()
    gc.disable()
    try:
        nodes = {path: list(ast.walk(ast.parse(text_of(path)))) for path in FILES}
        gc.freeze()
    finally:
        gc.enable()
    return nodes


def nodes_of(path: Path) -> list[ast.AST]:
    return _parsed().get(path) or list(ast.walk(ast.parse(text_of(path))))


def tree_of(path: Path) -> ast.Module:
    module = nodes_of(path)[0]
    assert isinstance(module, ast.Module)
    return module
