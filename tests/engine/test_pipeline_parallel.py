"""Tests of pipeline parallelism through LLM."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from tiny import check_against, generate, open_tiny, prompts_of

STAGES_ALONE = "windows and a tied head in two stages"
STATES = "states in two stages of two"
WORLDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    STAGES_ALONE: (
        "gemma2",
        {"num_hidden_layers": 4, "sliding_window": 5},
        {"pipeline_parallel_size": 2, "pp_layer_partition": "1,3"},
    ),
    "experts in two stages of two": (
        "qwen3_moe",
        {"num_hidden_layers": 3},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    STATES: (
        "qwen3_next",
        {},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "mamba_block_size": 8},
    ),
}


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(STAGES_ALONE, marks=pytest.mark.slow),
        "experts in two stages of two",
        pytest.param(STATES, marks=pytest.mark.slow),
    ],
)
def test_pipeline_matches_transformers(world: str, tmp_path: Path) -> None:
    """Check chunked prompts, shared prefixes and preempted rows."""
    family, overrides, sizes = WORLDS[world]
    path, hf = make_tiny(family, tmp_path, **overrides)
    settings = {"max_model_len": 64, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 26}
    llm = open_tiny(path, max_num_seqs=6, cpu_threads=1, **settings, **sizes)
    prompts = prompts_of(21, 5, 30, 1, 12, 17)
    prompts += [prompts[0][:16] + prompts[1], prompts[2] + [9]]
    outputs = generate(llm, prompts, count=20)
    check_against(hf, outputs)
    assert llm.llm_engine.core.scheduler.num_preemptions > 0
    assert generate(llm, [prompts[-1]], count=2)[0].num_cached_tokens
