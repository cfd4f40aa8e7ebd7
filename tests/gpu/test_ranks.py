"""Tests of ranks on a GPU: one in a separate process, and two that share the GPU, match the engine."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu
SIZE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 2000,
    "use_tqdm_on_load": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "a process": {"distributed_executor_backend": "mp"},
    "a process, in turn": {"distributed_executor_backend": "mp", "async_scheduling": False},
    "shares": {"tensor_parallel_size": 2, "enforce_eager": True},
    "stages": {"pipeline_parallel_size": 2, "enforce_eager": True},
}
PROMPTS = [[5 + (7 * number + place) % 900 for place in range(3 + 11 * number)] for number in range(24)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("ranks"), **SIZE)[0]


def answers(path: Path, **settings: Any) -> list[Any]:
    llm = LLM(str(path), **(SETTINGS | settings))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.llm_engine.close()
    return outputs


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Any]:
    return answers(tiny)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_match_the_engine(
    way: str, tiny: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_TEST_SHARE_GPU", "1")
    for actual, wanted in zip(answers(tiny, **WAYS[way]), expected, strict=True):
        assert actual.token_ids == wanted.token_ids
        assert actual.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-2)
