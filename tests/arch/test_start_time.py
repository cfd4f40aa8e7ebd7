"""Tests that no heavy module is imported before it is needed; imports are checked, not times."""

import subprocess
import sys

import pytest

TELL = "print(*sys.modules, file=sys.stderr)"
HELP = """
import runpy, sys
sys.argv = ["quire", *{flags}]
try:
    runpy.run_module("quire", run_name="__main__")
except SystemExit as end:
    assert not end.code
"""


def modules_after(code: str) -> set[str]:
    """Return the modules that a new interpreter has after running `code`."""
    command = [sys.executable, "-c", f"import sys\n{code}\n{TELL}"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stderr.split())


@pytest.mark.parametrize(
    ("code", "most"),
    [("import quire", 60), (HELP.format(flags=["--help"]), 120)],
    ids=["import quire", "quire --help"],
)
def test_startup_imports_few_modules(code: str, most: int) -> None:
    """Catches torch, numpy, fastapi or any other third-party package at startup, and a start that imports
    half of Quire."""
    imported = modules_after(code) - modules_after("pass")
    packages = {name.partition(".")[0] for name in imported}
    assert "quire" in packages
    assert packages - {"quire"} - sys.stdlib_module_names == set()
    assert len(imported) <= most


def test_help_of_serve_does_not_import_the_engine() -> None:
    """Catches a flag whose section imports the readers of checkpoints, the metrics or the HTTP framework."""
    imported = modules_after(HELP.format(flags=["serve", "--help"]))
    heavy = {
        "torch",
        "numpy",
        "tokenizers",
        "prometheus_client",
        "fastapi",
        "uvicorn",
        "quire.metrics.engine",
        "quire.config.engine",
    }
    assert "quire.server.settings" in imported and imported & heavy == set()


def test_supervisor_imports_neither_the_engine_nor_the_web_server() -> None:
    """Catches a process that starts others and takes the memory, and the seconds, of what they import."""
    modules = ("early_core", "launch", "launch_models", "models_config", "serve")
    imported = modules_after("import " + ", ".join(f"quire.entrypoints.{name}" for name in modules))
    heavy = {
        *("torch", "tokenizers", "PIL", "zmq", "prometheus_client", "psutil", "tqdm"),
        *("fastapi", "pydantic", "uvicorn", "uvloop"),
        *("quire.core.process", "quire.core.build", "quire.executor", "quire.frontend.engine"),
        *("quire.server.app", "quire.server.main", "quire.entrypoints.api_process"),
    }
    assert "quire.entrypoints.launch" in imported and imported & heavy == set()


def test_engine_arguments_and_lora_flags_import_no_event_loop() -> None:
    """Catches an import before the engine core starts, which all imports of the core then wait for."""
    imported = modules_after("import quire.entrypoints.serve, quire.entrypoints.early_core")
    heavy = {"asyncio", "filelock", "numpy", "quire.config.engine", "quire.config.engine_args"}
    assert "quire.entrypoints.serve" in imported and imported & heavy == set()
