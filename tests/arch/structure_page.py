"""Generate docs/structure.md from the floors and the first sentence of every module's docstring.

PYTHONPATH=src python tests/arch/structure_page.py"""

import ast
import re
from pathlib import Path

from floors import FLOORS, TORCH_FREE
from sources import ROOT, tree_of

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "structure.md"

INTRODUCTION = """# Structure

Imports point down: a file imports only from folders on lower floors (`tests/arch/test_floors.py`).
This page is made by `tests/arch/structure_page.py` from the floors and the module docstrings.

A step goes around once: `core/engine_core.py` asks `sched/scheduler.py` for a plan, sends it through
`executor/` to `worker/runner.py`, and gives the result back to the scheduler. Before that, `frontend/` turns
user input into requests; after it, tokens into text.

A server has three kinds of processes. `entrypoints/launch.py` supervises them. API processes run `server/`
over `frontend/engine.py`. Core processes run `core/process.py`, with the worker inside or with one child
process per rank ([ranks.md](ranks.md)). Every API process has a connection to every core, and they exchange
the messages of `data/wire.py`. All processes count into pages of one shared file (`metrics/`).
"""


def summary(path: Path) -> str:
    """Return the first sentence of a file's docstring or first C comment."""
    if path.suffix == ".py":
        text = ast.get_docstring(tree_of(path)) or ""
    else:
        match = re.match(r"/\*(.*?)(\*/|\n \*\s*\n)", path.read_text(), re.DOTALL)
        text = re.sub(r"\n \*", " ", match[1]) if match else ""
    text = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[^.][.])\s+(?=[A-Z`])", text, maxsplit=1)[0].removesuffix(".").replace("|", "\\|")


def floors_table() -> str:
    rows = ["| floor | folders and files | imports torch |", "|--:|---|---|"]
    for height, names in enumerate(FLOORS):
        shown = ", ".join(f"`{name}/`" if (ROOT / name).is_dir() else f"`{name}.py`" for name in names)
        free = [name in TORCH_FREE or not (ROOT / name).is_dir() for name in names]
        rows.append(f"| {height} | {shown} | {'no' if all(free) else 'some' if any(free) else 'yes'} |")
    return "\n".join(rows)


def folder_table(folder: Path) -> str:
    files = sorted(p for p in folder.iterdir() if p.suffix in (".py", ".c", ".h"))
    name = folder.relative_to(ROOT)
    lines = [f"## {'src/quire' if folder == ROOT else f'`{name}/`'}", ""]
    init = folder / "__init__.py"
    if folder != ROOT and init.exists() and summary(init):
        lines += [f"{summary(init)}.", ""]
    files = [path for path in files if path.name != "__init__.py" or folder == ROOT]
    lines += ["| file | what it is |", "|---|---|"] if files else []
    for path in files:
        lines.append(f"| `{path.relative_to(ROOT)}` | {summary(path)} |")
    return "\n".join(lines)


def page() -> str:
    folders = [ROOT, *sorted(p for p in ROOT.rglob("*") if p.is_dir() and any(p.glob("*.[pch]*")))]
    folders = [p for p in folders if p.name not in ("__pycache__", "templates")]
    return "\n\n".join([INTRODUCTION.strip(), floors_table(), *map(folder_table, folders)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
