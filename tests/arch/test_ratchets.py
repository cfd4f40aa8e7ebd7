"""Tests of sizes that may only shrink. To raise a number here is a decision: give the reason in the
commit."""

import ast
from pathlib import Path

import pytest
from sources import FILES, ROOT, nodes_of, text_of, tree_of

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
RUNNER_RUN_STATEMENTS = 10
MAX_TUPLE_SPLATS = 99
"""Calls that unpack a tuple built in the same function (`rest = a, b; f(x, *rest)`); may only fall."""
SIZES = {
    # file: (class, lines of the file, methods, attributes set in __init__)
    "worker/runner.py": ("Runner", 60, 3, 7),
    "sched/scheduler.py": ("Scheduler", 320, 21, 15),
    "core/engine_core.py": ("EngineCore", 130, 14, 3),
}


def class_of(path: Path, name: str) -> ast.ClassDef:
    return next(node for node in tree_of(path).body if isinstance(node, ast.ClassDef) and node.name == name)


@pytest.mark.parametrize("file", SIZES)
def test_core_classes_stay_small(file: str) -> None:
    name, max_lines, max_methods, max_attributes = SIZES[file]
    path = ROOT / file
    methods = [node for node in class_of(path, name).body if isinstance(node, ast.FunctionDef)]
    init = next(method for method in methods if method.name == "__init__")
    stores = [
        node for node in ast.walk(init) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    assert len(path.read_text().splitlines()) <= max_lines
    assert len(methods) <= max_methods
    assert len({store.attr for store in stores}) <= max_attributes


def test_runner_step_stays_short() -> None:
    methods = class_of(ROOT / "worker/runner.py", "Runner").body
    run = next(node for node in methods if isinstance(node, ast.FunctionDef) and node.name == "submit")
    assert len(run.body) <= RUNNER_RUN_STATEMENTS


def test_files_and_functions_stay_short() -> None:
    too_long = []
    for path in FILES:
        text = text_of(path)
        name = path.relative_to(ROOT)
        if len(text.splitlines()) > MAX_FILE_LINES:
            too_long.append(f"{name} has more than {MAX_FILE_LINES} lines")
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{name}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}")
    assert not too_long, "\n".join(too_long)


def test_every_public_class_has_a_docstring() -> None:
    classes = [
        (path, node) for path in FILES for node in tree_of(path).body if isinstance(node, ast.ClassDef)
    ]
    silent = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path, node in classes
        if node.name[0] != "_" and ast.get_docstring(node) is None
    ]
    assert not silent


def local_tuples(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names that a function assigns tuple literals to."""
    names = set()
    for node in ast.walk(function):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name):
            names.add(target.id)
        elif isinstance(target, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
            names |= {a.id for a, b in pairs if isinstance(a, ast.Name) and isinstance(b, ast.Tuple)}
    return names


def test_calls_name_their_arguments() -> None:
    """A call unpacks a local tuple, so that a reader cannot see its arguments."""
    splats = []
    for path in FILES:
        for function in nodes_of(path):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = local_tuples(function)
            for call in ast.walk(function) if names else ():
                if not isinstance(call, ast.Call):
                    continue
                starred = [arg.value for arg in call.args if isinstance(arg, ast.Starred)]
                splats += [f"{path}:{call.lineno}" for x in starred if getattr(x, "id", "") in names]
    assert len(splats) <= MAX_TUPLE_SPLATS, "\n".join(splats)
