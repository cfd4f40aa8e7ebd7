"""Penalties with speculative decoding (CVE-2026-44223): a request with a penalty ended vLLM's engine when
tokens were drafted. Quire counts the accepted tokens: the answers equal those without drafts, and the engine
continues."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from test_drafts import AlwaysDraft
from tiny import open_tiny

from quire import SamplingParams

FEW = {"allowed_token_ids": [3, 4, 5, 6], "max_tokens": 24, "ignore_eos": True}
"""Four tokens repeat often: some drafts are accepted, others are not."""
PENALTIES: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "repetition_penalty": 1e-9},
    {"temperature": 0.7, "seed": 1, "frequency_penalty": 2.0, "presence_penalty": -2.0},
    {"temperature": 0.7, "seed": 2, "frequency_penalty": -2.0, "presence_penalty": 2.0},
    {"temperature": 0},
]
DRAFTS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_min_token_prob": 0.0},
]


def answers(path: Path, pace: AlwaysDraft | None = None, **settings: Any) -> list[list[int]]:
    llm = open_tiny(path, max_model_len=64, max_num_seqs=8, **settings)
    drafting = llm.llm_engine.core.scheduler.admitter.drafting
    if pace is not None:
        assert drafting is not None
        drafting._draft_length = pace  # type: ignore[assignment]
    params = [SamplingParams(**FEW, **penalties) for penalties in PENALTIES]
    outputs = llm.generate([[3, 4, 5, 3, 4, 5, 3]] * len(params), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("penalties"))[0]


@pytest.mark.parametrize("config", DRAFTS, ids=lambda config: config["method"])
def test_penalties_are_the_same_with_drafts(path: Path, config: dict[str, Any]) -> None:
    pace = AlwaysDraft()
    assert answers(path, pace, speculative_config=config) == answers(path)
    assert 10 < pace.num_held < pace.num_drafts, "some drafts are accepted, and some are rejected"
