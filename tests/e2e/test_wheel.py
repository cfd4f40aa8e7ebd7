"""Tests that the wheel installs, generates and serves without the repository."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_text import TextModel

ROOT = Path(__file__).parents[2]
ASK = """
import sys
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", num_gpu_blocks_override=64, max_model_len=128)
print("said", repr(llm.generate("A page is", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text))
import quire
print("from", quire.__file__)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_works_in_an_empty_environment(
    tiny: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a file that is missing in the wheel: a C kernel, a template, the page."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("quire-*.whl")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    words = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(words, check=True)
    quire = str(tmp_path / "env" / "bin" / "quire")
    version = subprocess.run([quire, "--version"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert version.stdout.strip() in wheel.name
    done = subprocess.run(
        [python, "-c", ASK, str(tiny.path)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "said" in done.stdout and str(tmp_path) in done.stdout
    listed = subprocess.run(
        [python, "-c", "from quire.server import page; print(*page.__path__)"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    there = {path.name for path in Path(listed.stdout.strip()).iterdir()}
    assert {path.name for path in (ROOT / "src/quire/server/page").glob("*.*")} <= there
