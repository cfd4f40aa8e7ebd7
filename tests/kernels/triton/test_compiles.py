"""What Triton's interpreter runs also compiles for a GPU, which is not needed for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOME = [
    "tests/kernels/triton/test_attention.py::test_uneven_sequences[1-None]",
    "tests/kernels/triton/test_lora.py::test_sums_in_several_parts[3]",
]
ALL = ["tests/kernels/triton", "tests/attention/test_backends.py", "tests/sampling"]
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
    given = maybe(x)
    tl.store(out, 1)

def test_it() -> None:
    launch(kernel, 1)(torch.zeros(1), None)
"""


def compiled(*tests: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    asked = ["-q", "-p", "compile_only", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *tests]
    command = [sys.executable, "-m", "pytest", *asked]
    return subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True, timeout=seconds)


def test_some_of_them() -> None:
    done = compiled(*SOME)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_of_them() -> None:
    done = compiled(*ALL, seconds=3600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_kernel_that_only_the_interpreter_runs_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text(WRONG)
    done = compiled(str(tmp_path / "test_wrong.py"))
    assert done.returncode == 1 and "CompilationError" in done.stdout, done.stdout + done.stderr
