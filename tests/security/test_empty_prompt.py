"""Prompts without a token (CVE-2024-8768): an empty prompt ended vLLM's engine and all its requests. Quire
refuses it in every form before it reaches the engine."""

from pathlib import Path
from typing import Any

import pytest
from ask import EMBEDDER, ask, complete, refused
from fake_engine import FakeEngine
from oracle import make_tiny
from tiny import open_tiny

from quire import SamplingParams
from quire.errors import RequestError


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[5], []], None], ids=str)
def test_empty_prompts_do_not_reach_the_engine(prompt: Any) -> None:
    engine = FakeEngine()
    refused(complete(engine, prompt=prompt))
    assert not engine.seen
    assert complete(engine, prompt="a", truncate_prompt_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "truncate_prompt_tokens": 0}),
        ("/v1/chat/completions", {"messages": []}),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": [[]]}),
    ],
)
def test_every_route_refuses_empty_prompts(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(pooling=EMBEDDER if path == "/v1/embeddings" else None)
    refused(ask("POST", path, engine=engine, json=body))
    assert not engine.seen and not engine.pooled


def test_engine_answers_after_an_empty_prompt(tmp_path: Path) -> None:
    llm = open_tiny(make_tiny("llama", tmp_path)[0], max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with pytest.raises(RequestError, match="The decoder prompt cannot be empty"):
        llm.generate([[5, 6], []], params, use_tqdm=False)
    (answer,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 2
