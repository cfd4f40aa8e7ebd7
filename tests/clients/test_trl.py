"""TRL's GRPO trainer with Quire as its vLLM: five steps on a tiny model, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_text import TextModel, text_model

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("grpo.py")
PATIENCE_S = 500
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def train(model: TextModel, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "quire.vllm", str(SCRIPT), str(model.path), str(folder)],
        env=environment,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-4000:]
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_grpo_trains_with_the_logprobs_of_its_own_model(model: TextModel, tmp_path: Path) -> None:
    """Catches weights that do not reach the engine, and rollouts that are not reproducible."""
    pytest.importorskip("trl")
    first = train(model, tmp_path / "first")
    steps = [step for step in first["steps"] if "loss" in step]
    assert len(steps) == 5 and len(first["completions"]) == 5
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < TOLERANCE, step
    assert len({step["grad_norm"] for step in steps}) == 5  # the model changes with every step
    assert train(model, tmp_path / "second")["completions"] == first["completions"]
