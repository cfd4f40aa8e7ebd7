"""Tests of lm-eval and guidellm, run as their users run them."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from client_cases import MODEL
from serve_process import ServeProcess

pytestmark = pytest.mark.slow

TASKS = Path(__file__).parent / "tasks"
PATIENCE_S = 900
"""Time limit of a tool: importing and indexing its tasks takes minutes on a busy machine."""


def run(*words: str, cwd: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, env=environment, capture_output=True, timeout=PATIENCE_S
    )
    text = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, text[-4000:]
    return text


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Save the default model's tokenizer as files that transformers reads."""
    from quire.checkpoint.hub import locate
    from quire.config.env import Env
    from quire.text.tokenizer import load_tokenizer

    place = tmp_path / "tokenizer"
    place.mkdir()
    result = locate(None, cache_root=Env.read(os.environ).cache_root, progress=False)
    known = load_tokenizer(result, "gguf")
    known.backend.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": known.eos_token}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_loglikelihood_and_generation(url: str, tokenizer: Path, tmp_path: Path) -> None:
    """Likelihoods come from `echo` with logprobs; a wrong offset in them would choose at random."""
    for task in TASKS.glob("*.yaml"):
        text = task.read_text().replace("CAPITALS", str(TASKS / "capitals.jsonl"))
        (tmp_path / task.name).write_text(text)
    request = (
        f"model={MODEL},base_url={url}/completions,tokenizer={tokenizer},num_concurrent=2,max_length=512"
    )
    run(
        *(
            "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            request,
            "--include_path",
            str(tmp_path),
        ),
        *("--tasks", "capitals_choice,capitals_text", "--output_path", str(tmp_path / "out")),
        cwd=tmp_path,
    )
    (report,) = (tmp_path / "out").rglob("results*.json")
    results: dict[str, Any] = json.loads(report.read_text())["results"]
    assert results["capitals_choice"]["acc,none"] == 1.0
    assert results["capitals_text"]["exact_match,none"] >= 0.6


@pytest.mark.skipif(find_spec("guidellm") is None, reason="guidellm is not installed")
def test_guidellm_measures_ten_seconds(served: ServeProcess, tokenizer: Path, tmp_path: Path) -> None:
    run(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={served.url},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_duration,seconds=10"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--disable-console"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        cwd=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] > 0 and totals["errored"] == 0
