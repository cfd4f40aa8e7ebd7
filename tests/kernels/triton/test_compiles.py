"""Tests that the kernels compile for a GPU, without one."""

import os
from pathlib import Path

import pytest
from preloaded import Preloaded

ROOT = Path(__file__).parents[3]
SOME = [
    "tests/kernels/triton/test_attention.py::test_uneven_sequences[1-None]",
    "tests/kernels/triton/test_lora.py::test_split_sums[3]",
    "tests/kernels/triton/test_ops.py::test_gated[silu<1.5-dtype0]",
]
ALL = [
    "tests/kernels/triton",
    "tests/attention/test_backends.py",
    "tests/sampling",
    "--ignore=tests/kernels/triton/test_compiles.py",
]
WRONG = """
import torch, triton, triton.language as tl
from quire.kernels.triton.launch import launch

@triton.jit
def maybe(x):
    if x is None:
        return None
    return tl.load(x)

@triton.jit
def kernel(out, x):
    value = maybe(x)
    tl.store(out, 1)

def test_wrong() -> None:
    launch(kernel, 1)(torch.zeros(1), None)
"""


RUN_TESTS = """
import os, sys, pytest
root = sys.argv[1]
os.chdir(root)
sys.path.insert(0, os.path.join(root, "tests"))
sys.exit(pytest.main(sys.argv[2:]))
"""


def compiled(
    preloaded: Preloaded, log: Path, *tests: str, marks: str = "not gpu and not slow", seconds: float = 300
) -> tuple[int, str]:
    """Run these tests without Triton's interpreter, and return the exit code and the output."""
    options = ["-c", str(ROOT / "pyproject.toml"), "-q", "-p", "compile_only", "-p", "no:cacheprovider"]
    words = ["-c", RUN_TESTS, str(ROOT), *options, "-m", marks, *tests]
    process = preloaded.run_code(words, environment=os.environ | {"TRITON_INTERPRET": "0"}, log=log)
    return process.wait(seconds), log.read_text()


def test_some_kernels_compile_and_an_invalid_one_does_not(tmp_path: Path, preloaded: Preloaded) -> None:
    """Compile in one process, since starting it takes longer than compiling these kernels."""
    (tmp_path / "test_wrong.py").write_text(WRONG)
    code, output = compiled(preloaded, tmp_path / "log", *SOME, str(tmp_path / "test_wrong.py"))
    failures = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert code == 1 and f"1 failed, {len(SOME)} passed" in output, output
    assert len(failures) == 1 and "::test_wrong - triton.compiler.errors.Comp" in failures[0], output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_kernels_compile(tmp_path: Path, preloaded: Preloaded) -> None:
    """Check all shapes, also those that the interpreter runs only with `-m slow`."""
    code, output = compiled(preloaded, tmp_path / "log", *ALL, marks="not gpu", seconds=3600)
    assert code == 0, output
