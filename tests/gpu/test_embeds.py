"""Tests of prompt embeddings on a GPU: beside decodes in graphs, in chunks, and of one token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import opened
from oracle import make_tiny
from tiny import prompts_of

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu
SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "in turn": {"async_scheduling": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_prompt_embeds_match_token_ids_on_gpu(way: str, tmp_path: Path) -> None:
    path, hf = make_tiny("qwen3", tmp_path, **SIZE)
    token_prompts = [*prompts_of(23, 90, 1, 40, 1, 60, 5, 33), [7]]
    table = hf.get_input_embeddings().weight.detach()
    mixed_prompts: list[Any] = [
        ids if place % 3 == 0 else {"prompt_embeds": table[torch.tensor(ids)].cuda()}
        for place, ids in enumerate(token_prompts)
    ]
    llm = opened(path, "float32", enable_prompt_embeds=True, **WAYS[way])
    expected = generated_ids(llm, token_prompts)
    assert generated_ids(llm, mixed_prompts) == expected
    assert [generated_ids(llm, [item])[0] for item in mixed_prompts] == expected


def generated_ids(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
