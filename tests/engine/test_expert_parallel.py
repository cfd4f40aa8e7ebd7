"""Tests of LLM with expert parallelism within an engine and between engines that step together."""

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from oracle import make_tiny
from tiny import open_tiny, prompts_of

from quire import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
PROMPTS = prompts_of(3, 17, 1, 9, 30, 12, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("model"))[0]


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[Any]]]:
    """Return the tokens of each answer, and the experts of its tokens."""
    answers = [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    return [(list(answer.token_ids), np.sort(answer.routed_experts).tolist()) for answer in answers]


CASES: dict[str, dict[str, Any]] = {
    "within an engine": {"tensor_parallel_size": 2},
    "between engines": {
        "data_parallel_size": 2,
        "enable_eplb": True,
        "eplb_config": {"step_interval": 4, "window_size": 4, "num_redundant_experts": 2},
    },
}


def engine_cores() -> list[psutil.Process]:
    """Return the core processes of this process, including those of other tests."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name().startswith("quire:Engine")
    ]


@pytest.mark.parametrize("case", CASES)
def test_outputs_match_one_device(case: str, model: Path) -> None:
    one, before = open_tiny(model, enable_return_routed_experts=True), engine_cores()
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_return_routed_experts": True}
    many = open_tiny(model, enable_expert_parallel=True, **settings, **CASES[case])
    cores = [core for core in engine_cores() if core not in before]
    for prompts in (PROMPTS, PROMPTS[:1]):  # all cores have work; then one has
        assert answers(many, prompts) == answers(one, prompts)
    if "data_parallel_size" in CASES[case]:
        many.llm_engine.close()
        assert len(cores) == 2 and not psutil.wait_procs(cores, timeout=60)[1]
