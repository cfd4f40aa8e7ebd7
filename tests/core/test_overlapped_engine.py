"""Tests that outputs of the whole engine do not depend on steps in flight."""

from typing import Any

import pytest
from tiny_text import TextModel, open_text, text_model

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput
from quire.data.params import RepetitionDetectionParams
from quire.kernels.cpu import native

PROMPTS = [[5 + (7 * n + 3 * i) % 300 for i in range(1 + 5 * n)] for n in range(7)]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11, "top_p": 0.9},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "bad words": {"temperature": 0, "bad_words": ["the page", "in", "ow aL"]},
    "min tokens": {"temperature": 1.5, "seed": 3, "min_tokens": 9, "ignore_eos": False},
    "stop string": {"temperature": 0, "stop": ["e", "r"]},
    "repetition": {
        "temperature": 0,
        "repetition_detection": RepetitionDetectionParams(
            max_pattern_size=3, min_pattern_size=1, min_count=2
        ),
    },
}
MODES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 5},
    "preempting": {"num_gpu_blocks_override": 26, "max_model_len": 64},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.mktemp("tiny"))


def say(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_do_not_depend_on_steps_in_flight(model: TextModel, mode: str) -> None:
    plain, overlapped = (open_text(model, **MODES[mode]) for _ in range(2))
    overlapped.llm_engine.core.step_queue.depth = 2
    for name, settings in PARAMS.items():
        params = SamplingParams(**({"max_tokens": 16, "ignore_eos": True} | settings))
        for one, two in zip(say(plain, params), say(overlapped, params), strict=True):
            assert one.outputs[0].token_ids == two.outputs[0].token_ids, name
            if native.library() is not None:  # torch's sums depend on the batch
                assert one.outputs[0] == two.outputs[0], name
                assert one.prompt_logprobs == two.prompt_logprobs, name
    scheduler = overlapped.llm_engine.core.scheduler
    assert scheduler.kv.pool.usage == 0.0
    assert (scheduler.num_preemptions > 0) == (mode == "preempting")
