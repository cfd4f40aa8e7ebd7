"""Tests of the example of docs/logits_processors.md in a server and in an engine with ranks."""

import os
import re
import sys
from pathlib import Path

import pytest
from serve_process import Start, greedy
from tiny_text import TextModel

from quire import LLM, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "logits_processors.md"
_EXAMPLE = re.compile(r"^```python\n# my_processors\.py\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the Python module of the page."""
    (example,) = _EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    (tmp_path / "my_processors.py").write_text(example, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


@pytest.mark.slow
def test_requests_of_a_server_reach_the_processor(folder: Path, start: Start) -> None:
    """Catches arguments that are dropped on the way, and a refusal that is not a 400."""
    server = start("--logits-processors", "my_processors:Forced", fresh=True)
    server.until_healthy()

    def post(target: object) -> tuple[int, dict[str, object]]:
        body = greedy(max_tokens=4, return_token_ids=True, vllm_xargs={"target": target})
        reply = server.client.post("/v1/completions", json=body)
        return reply.status_code, reply.json()

    status, reply = post(42)
    assert status == 200 and reply["choices"][0]["token_ids"] == [42] * 4  # type: ignore[index]
    status, reply = post("x")
    assert status == 400 and "target must be a token id, got 'x'" in str(reply["error"])
    server.end_cleanly()


def test_ranks_run_the_processor(tiny: TextModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    settings = {"dtype": "float32", "tensor_parallel_size": 2, "num_gpu_blocks_override": 64}
    try:
        llm = LLM(str(tiny.path), logits_processors=["my_processors:Forced"], **settings)
        params = SamplingParams(temperature=0, max_tokens=4, extra_args={"target": 9})
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == [9] * 4
    finally:
        sys.modules.pop("my_processors", None)
