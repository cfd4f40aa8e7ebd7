"""Tests of the import order: imports point down, and torch-free folders do not import torch."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from floors import FLOORS, TORCH_FREE
from sources import FILES, ROOT, nodes_of

FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Return every import in the file with its line, in functions and under TYPE_CHECKING too."""
    imports = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            imports.append((node.lineno, node.module or ""))
    return imports


def test_every_folder_has_a_floor() -> None:
    assert {folder_of(path) for path in FILES} <= set(FLOOR)


def test_imports_point_down() -> None:
    """Catches an import of a higher floor, or of another folder on the same one."""
    upward = []
    for path in FILES:
        here = folder_of(path)
        for line, module in imported(path):
            there = "__init__" if module == "quire" else module.removeprefix("quire.").split(".")[0]
            if module.partition(".")[0] != "quire" or there == here:
                continue
            if there == "__init__" or FLOOR[there] >= FLOOR[here]:
                upward.append(f"{path.relative_to(ROOT)}:{line}: {here} must not import {there}")
    assert not upward, "\n".join(upward)


def test_no_import_cycles() -> None:
    """Catches a file that imports itself through others."""
    imports = {module: imports_of(module) for module in MODULES}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports_of(module: str) -> set[str]:
    """Return the modules of the package that `module` imports."""
    return {name for _, name in imported(MODULES[module]) if name in MODULES and name != "quire"} - {module}


def test_torch_free_folders_import_without_torch() -> None:
    """Import every file of these folders in one process in which torch cannot be imported."""
    folders = {
        name: [module for module in MODULES if module.split(".")[1:2] == [name]] for name in TORCH_FREE
    }
    assert all(folders.values()), "a folder has no files"
    modules = sum(folders.values(), [])
    modules.remove("quire.executor.inprocess")  # the connection to the device code
    for name in ("fleet", "ingress", "replica", "serve"):
        modules.remove(f"quire.entrypoints.ray_{name}")  # they need Ray
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_folder_on_the_path_of_tests_is_taken_for_a_package() -> None:
    """torch and transformers look for optional packages, and would take a folder of that name for one."""
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {path.name for place in settings["pythonpath"] for path in (root / place).iterdir()}
    assert not folders & {"triton", "torch", "transformers", "torchvision", "flash_attn", "flashinfer", "ray"}
