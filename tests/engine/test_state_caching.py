"""Tests of prefix caching in models with SSM states: answers after a hit equal those without one."""

from pathlib import Path

import pytest
import torch
from oracle import make_tiny
from tiny import check_against, generate, logits_of, open_tiny, prompts_of

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput

FAMILIES = [
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Zamba2ForCausalLM",
]
EVERY_8 = {"enable_prefix_caching": True, "mamba_block_size": 8, "prefix_cache_retention_interval": 8}


def without_hits(llm: LLM, prompts: list[list[int]], count: int) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logprobs=-1, skip_reading_prefix_cache=True
    )
    return llm.generate(prompts, params, use_tqdm=False)


def cached(outputs: list[RequestOutput]) -> list[int | None]:
    return [output.num_cached_tokens for output in outputs]


def check_equal(hits: list[RequestOutput], misses: list[RequestOutput]) -> None:
    assert cached(misses) == [0] * len(misses)
    for hit, miss in zip(hits, misses, strict=True):
        assert hit.outputs[0].token_ids == miss.outputs[0].token_ids
        torch.testing.assert_close(logits_of(hit), logits_of(miss), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_after_a_hit_equal_those_without(family: str, tmp_path: Path) -> None:
    """Check prefixes around the boundaries of blocks (4 tokens) and of checkpoints (8 tokens)."""
    path, hf_model = make_tiny(family, tmp_path)
    llm = open_tiny(path, **EVERY_8)
    (text,) = prompts_of(27)
    check_against(hf_model, generate(llm, [text], count=1))
    prompts = [text[:length] for length in (7, 8, 9, 12, 16, 17, 24, 25, 27)]
    prompts.append(text[:19] + prompts_of(6, seed=4)[0])
    hits = generate(llm, prompts, count=3)
    assert cached(hits) == [0, 0, 8, 8, 8, 16, 16, 24, 24, 16]
    check_equal(hits, without_hits(llm, prompts, count=3))
