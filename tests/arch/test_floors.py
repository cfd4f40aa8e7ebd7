"""The house stands: imports point down, and the wings that must not know torch do not."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "quire"
FLOORS = [
    ["errors", "logs", "version"],
    ["unbuilt"],
    ["config", "data", "registry"],
    ["hub", "capacity", "dist", "sched", "text", "metrics", "grammar", "remote"],
    ["comm", "kernels", "multimodal", "prepare"],
    ["attention", "quant", "frontend"],
    ["layers", "sampling", "spec", "server"],
    ["models", "lora"],
    ["loader"],
    ["worker"],
    ["executor"],
    ["core", "api_process"],
    ["private"],
    ["offline", "async_llm"],
    ["llm", "launch"],
    ["bench", "batch", "terminal", "quantize"],
    ["plan", "vllm"],
    ["cli"],
    ["__main__", "__init__"],
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}
TORCH_FREE = [
    "config",
    "data",
    "sched",
    "text",
    "frontend",
    "metrics",
    "multimodal",
    "hub",
    "capacity",
    "cli",
    "plan",
    "core",
    "executor",
    "remote",
    "prepare",
    "api_process",
    "launch",
    "grammar",
]
FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Every import anywhere in the file, with its line: in functions and under TYPE_CHECKING too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or ""))
    return found


def test_every_folder_has_a_floor() -> None:
    assert {room(path) for path in FILES} <= set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    for line, module in imported(path):
        if module == "quire":
            there = "__init__"
            allowed = False
        elif module.startswith("quire."):
            there = module.split(".")[1]
            allowed = there == here or FLOOR[there] < FLOOR[here]
        else:
            continue
        assert allowed, f"{path.name}:{line}: {here} must not know {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_circles_inside_a_folder(path: Path) -> None:
    """A file of a folder never reaches itself through the others."""
    seen: set[str] = set()
    start = module_name(path)
    stack = [start]
    while stack:
        for reached in neighbours(stack.pop()):
            assert reached != start, f"{start} imports itself through {sorted(seen)}"
            if reached not in seen:
                seen.add(reached)
                stack.append(reached)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def neighbours(module: str) -> set[str]:
    return {name for _, name in imported(MODULES[module]) if name in MODULES and name != "quire"}


@pytest.mark.parametrize("name", TORCH_FREE)
def test_wing_imports_without_torch(name: str) -> None:
    """Import every file of the wing with torch made unimportable."""
    modules = [module for module in MODULES if module.split(".")[1:2] == [name]]
    modules = [
        module for module in modules if module != "quire.executor.inprocess"
    ]  # the seam to the device wing
    assert modules
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
