"""Tests that the kernels compile for a GPU, without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def compiled(
    *tests: str, marks: str = "not gpu and not slow", seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    options = ["-c", str(ROOT / "pyproject.toml"), "-q", "-p", "compile_only", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-m", marks, *tests]
    return subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True, timeout=seconds)


def test_some_kernels_compile_and_an_invalid_one_does_not(tmp_path: Path) -> None:
    """Compile in one process, since starting it takes longer than compiling these kernels."""
    (tmp_path / "test_wrong.py").write_text(WRONG)
    done = compiled(*SOME, str(tmp_path / "test_wrong.py"))
    output = done.stdout + done.stderr
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.returncode == 1 and f"1 failed, {len(SOME)} passed" in done.stdout, output
    assert len(failures) == 1 and "::test_wrong - triton.compiler.errors.Comp" in failures[0], output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_kernels_compile() -> None:
    """Check all shapes, also those that the interpreter runs only with `-m slow`."""
    done = compiled(*ALL, marks="not gpu", seconds=3600)
    assert done.returncode == 0, done.stdout + done.stderr
