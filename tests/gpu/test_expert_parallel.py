"""Tests of several ranks on one GPU, communicating through the host, against one rank."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from tiny import prompts_of

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2, ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp 2": {"data_parallel_size": 2},
    "dp 2, ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


def tokens(path: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=100,
        gpu_memory_utilization=0.4,
        enforce_eager=True,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts_of(23, 9, 70, 5), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path, _ = make_tiny("qwen3_moe", tmp_path_factory.mktemp("moe"), **SIZES)
    return path, tokens(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_give_the_same_tokens(
    layout: str, moe: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_TEST_SHARE_GPU", "1")
    path, expected = moe
    assert tokens(path, **LAYOUTS[layout]) == expected
