"""TRL's GRPO trainer with Quire as its vLLM: five steps on a tiny model, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from serve_process import ServeProcess
from tiny_text import TextModel, text_model

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("grpo.py")
PATIENCE_S = 500
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def train(model: TextModel, folder: Path, *ports: int) -> dict[str, Any]:
    folder.mkdir()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "quire.vllm", str(SCRIPT), str(model.path), str(folder), *map(str, ports)],
        env=environment,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    text = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0 and "Exception ignored" not in text, text[-4000:]
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_grpo_trains_with_the_logprobs_of_its_own_model(model: TextModel, tmp_path: Path) -> None:
    """Catches weights that do not reach the engine, and rollouts that are not reproducible."""
    pytest.importorskip("trl")
    first = train(model, tmp_path / "first")
    check(first)
    assert train(model, tmp_path / "second")["completions"] == first["completions"]


def test_grpo_trains_with_a_server(model: TextModel, tmp_path: Path) -> None:
    """Check the updates that TRL broadcasts, here by Gloo, and their versions."""
    pytest.importorskip("trl")
    flags = ("--weight-transfer-config", json.dumps({"backend": "nccl"}), "--max-logprobs", "-1")
    flags += ("--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--generation-config", "vllm")
    environment = {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with ServeProcess(str(model.path), *flags, log=tmp_path / "log", env=environment) as server:
        server.until_healthy()
        check(train(model, tmp_path / "run", server.port, free_port()))
        assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "update-5"}


def check(run: dict[str, Any]) -> None:
    """Check that the engine's logprobs are those of the trainer in five steps, which change the model."""
    steps = [step for step in run["steps"] if "loss" in step]
    assert len(steps) == 5 and len(run["completions"]) == 5
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < TOLERANCE, step
    assert len({step["grad_norm"] for step in steps}) == 5  # the model changes with every step
