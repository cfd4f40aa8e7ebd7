"""Nothing heavy is imported before it is needed. What is imported is looked at, not how long that takes."""

import subprocess
import sys

import pytest

TELL = "print(*sys.modules, file=sys.stderr)"
HELP = """
import runpy, sys
sys.argv = ["quire", "--help"]
try:
    runpy.run_module("quire", run_name="__main__")
except SystemExit as end:
    assert not end.code
"""


def modules_after(code: str) -> set[str]:
    """The modules that a new interpreter has once it has run `code`."""
    command = [sys.executable, "-c", f"import sys\n{code}\n{TELL}"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stderr.split())


@pytest.mark.parametrize(
    ("code", "most"), [("import quire", 60), (HELP, 120)], ids=["import quire", "quire --help"]
)
def test_a_start_imports_little(code: str, most: int) -> None:
    """Catches torch, numpy, fastapi or any other package of somebody else at the start, and a start that
    imports half of Quire."""
    imported = modules_after(code) - modules_after("pass")
    packages = {name.partition(".")[0] for name in imported}
    assert "quire" in packages
    assert packages - {"quire"} - sys.stdlib_module_names == set()
    assert len(imported) <= most
