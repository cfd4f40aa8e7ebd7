"""Drafts that a GPU makes and judges by itself: outputs are those without any."""

from pathlib import Path
from typing import Any

import pytest
from drafted import Eager
from on_gpu import opened
from oracle import make_tiny
from tiny import prompts_of

from quire import SamplingParams

pytestmark = pytest.mark.gpu
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SIZE: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_k": 3, "seed": 2, "logprobs": 2},
    {"temperature": 0, "allowed_token_ids": [5, 6, 7]},
    {"temperature": 0.7, "allowed_token_ids": [5, 6, 7], "seed": 3},
    {"temperature": 0, "min_tokens": 20, "logit_bias": {9: 3.0}},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("drafts"), **SIZE)[0]


def answers(path: Path, **more: Any) -> list[Any]:
    llm = opened(path, "float32", **more)
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **each) for each in ASKED]
    prompts = prompts_of(23, 9, 40, 5, 12, 30, 3)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[Any]:
    return answers(tiny)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_outputs_are_those_without_drafts(
    enforce_eager: bool, tiny: Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that only the device knows, graphs with padded places, two steps in flight."""
    pace = Eager()
    monkeypatch.setattr("quire.core.build.Pace", lambda **sizes: pace)
    assert answers(tiny, speculative_config=DRAFTS, enforce_eager=enforce_eager) == plain
    assert 10 < pace.num_held < pace.num_drafts
