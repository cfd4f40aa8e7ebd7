"""Tests that a forward pass takes its inputs as arguments: layers, and the objects that they share, keep
nothing of a step."""

import ast
from collections.abc import Iterator
from pathlib import Path

from sources import FILES, ROOT, tree_of

SETUP = {
    *(
        "__init__",
        "set_target",
        "allocate",
        "begin",
        "bind",
        "bind_memory",
        "bind_kernels",
        "finish",
        "release",
    ),
    *("register", "set", "finalize", "share", "set_aux_hidden_state_layers", "unbind"),
}
"""Names of methods that build a layer, load its weights or bind its memory, and run between steps."""
KEPT = {
    ("layers/cross_attention.py", "self.queries"),  # a recording, which no layer reads
    ("layers/ssm.py", "batch.state"),  # built from the batch alone, by the first layer that needs it
}


def computing_files() -> list[Path]:
    """Return the files of models, of layers and of what layers share, except for transformers' own models."""
    folders = [path for path in FILES if {"models", "layers"} & set(path.relative_to(ROOT).parts)]
    own = [path for path in folders if not path.name.startswith("transformers_")]
    return [*own, ROOT / "parallel/all2all.py"]


def stores(source: ast.AST, name: str) -> Iterator[str]:
    """Yield the attributes of the object `name` that the code sets."""
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id == name:
                yield f"{name}.{node.attr}"


def kept_by(tree: ast.AST) -> set[str]:
    """Return the names that code stores during a step: attributes of a batch, and of `self` outside of
    `SETUP`."""
    kept = set(stores(tree, "batch"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in SETUP:
            kept |= set(stores(node, "self"))
    return kept


def test_layers_keep_nothing_of_a_step() -> None:
    """Check for a field that one layer sets for another, or that a caller sets and resets around a step."""
    kept = {
        (str(path.relative_to(ROOT)), name) for path in computing_files() for name in kept_by(tree_of(path))
    }
    assert kept <= KEPT, f"pass these as arguments of the forward pass: {sorted(kept - KEPT)}"
    assert kept == KEPT, "some of KEPT is no longer there"


def test_fields_around_a_step_are_found() -> None:
    source = """
class Slots:
    def __init__(self): self.step = None
    def using(self, step): self.step, self.count = step, 1
def forward(x, batch): batch.beside = x
"""
    assert kept_by(ast.parse(source)) == {"self.step", "self.count", "batch.beside"}
