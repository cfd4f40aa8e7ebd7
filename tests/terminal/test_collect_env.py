"""Tests of `quire collect-env`: complete, without secrets, and without starting anything."""

import json
import subprocess
import sys

import pytest

from quire.cli import main
from quire.config.machine import Machine
from quire.terminal.collect_env import collect, relevant
from quire.version import __version__

GPU = Machine("cuda", "H200", 2, 140 << 30, 140 << 30, 16, capability=(9, 0), bf16=True, fp16=True)


def test_secrets_are_masked() -> None:
    result = relevant(
        {
            "QUIRE_API_KEY": "sk-1",
            "HF_TOKEN": "hf_1",
            "HF_ENDPOINT": "https://me:pw@mirror/x",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "0",
            "HOME": "/root",
        }
    )
    assert result == {
        "QUIRE_API_KEY": "***",
        "HF_TOKEN": "***",
        "HF_ENDPOINT": "https://***@mirror/x",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def test_devices_are_described() -> None:
    device = collect({}, GPU)["Device"]
    assert device["name"] == "H200" and device["count"] == "2" and device["capability"] == "9.0"
    assert device["memory"].startswith("140.0 GiB") and device["native types"] == "float32, float16, bfloat16"


def test_text_and_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("Quire", "System", "Device", "Packages", "Environment"))
    assert main(["collect-env", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["Quire"]["version"] == __version__ and result["Packages"]["torch"]


def test_torch_is_not_imported() -> None:
    code = "import sys; from quire.cli import main; main(['collect-env']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
