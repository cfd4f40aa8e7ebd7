"""Tests that the engine's logits match transformers with any schedule."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from tiny import (
    caching_settings,
    check_against,
    check_mixed_schedule,
    generate,
    generate_preempted,
    open_tiny,
    prompts_of,
)
from zoo import LLAMA3, ZOO

from quire import SamplingParams

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    architecture: (architecture, {}) for architecture, specimen in ZOO.items() if not specimen.alike
} | {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", LLAMA3),
    "llama4-chunks": ("Llama4ForCausalLM", {"attention_chunk_size": 7}),
    "qwen3-some-windows": (
        "qwen3",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}

KINDS = ["llama", "mistral", "gemma3_text", "qwen3_moe", "deepseek_v3", "qwen3_next", "mamba", "lfm2"]
"""One family per kind of layer: full attention, windows, both, experts, MLA, and three kinds of
SSM states.
"""

Tiny = tuple[Path, Any]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_after_chunks_prefix_hits_and_preemption(variant: str, tmp_path: Path) -> None:
    """Check chunks that cut blocks, prompts beside decodes, cached prefixes and preemption in prompts and
    outputs.
    """
    family, overrides = VARIANTS[variant]
    check_mixed_schedule(*make_tiny(family, tmp_path, **overrides))


@pytest.fixture(scope="module", params=KINDS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_whole_prompts(tiny: Tiny) -> None:
    path, hf_model = tiny
    check_against(hf_model, generate(open_tiny(path), prompts_of(1, 2, 3, 4, 5, 8, 17, 31)))


def test_chunks_of_every_size(tiny: Tiny) -> None:
    path, hf_model = tiny
    llm = open_tiny(path, max_num_batched_tokens=39, max_num_seqs=3, enable_prefix_caching=False)
    for size in (*range(1, 13), 16, 23, 37):
        llm.llm_engine.core.scheduler.limits.longest_chunk = size
        check_against(hf_model, generate(llm, prompts_of(23, 9, 37), count=2))


def test_prefix_hits(tiny: Tiny) -> None:
    """Check blocks and SSM states shared too far or not at all."""
    path, hf_model = tiny
    llm = open_tiny(path, **caching_settings(path))
    (common,) = prompts_of(19)
    prompts = [common + tail for tail in prompts_of(1, 2, 5, 9, seed=8)] + [common, common[:8]]
    check_against(hf_model, generate(llm, prompts))
    second = generate(llm, prompts)
    check_against(hf_model, second)
    assert [output.num_cached_tokens for output in second] == [16, 20, 20, 24, 16, 4]


def test_preemption(tiny: Tiny) -> None:
    """Check preemption for lack of blocks, and forced preemption in a prompt and in an output.

    A model with windows alone reserves all its blocks at admission.
    """
    path, hf_model = tiny
    llm = open_tiny(
        path, max_num_batched_tokens=7, max_num_seqs=5, num_gpu_blocks_override=24, max_model_len=44
    )
    scheduler, prompts = llm.llm_engine.core.scheduler, prompts_of(10, 17, 12, 13, 9)
    check_against(hf_model, generate(llm, prompts, count=20))
    if scheduler.kv.windows == (None,):
        assert scheduler.num_preemptions > 0
    before = scheduler.num_preemptions
    check_against(hf_model, generate_preempted(llm, prompts, count=20, at=(1, 9, 20)))
    assert scheduler.num_preemptions >= before + 3


def test_mixed_batches(tiny: Tiny) -> None:
    path, hf_model = tiny
    llm = open_tiny(path, max_num_batched_tokens=64, max_num_seqs=33, enable_prefix_caching=False)
    prompts = prompts_of(*[1 + (7 * i) % 41 for i in range(33)])
    for batch in (1, 2, 5, 8, 16, 33):
        check_against(hf_model, generate(llm, prompts[:batch], count=4))


def test_64_long_requests_with_blocks_for_barely_two(tmp_path: Path) -> None:
    """Check that there is no livelock and that the outputs match those with ample blocks."""
    path, _ = make_tiny("llama", tmp_path)
    prompts = prompts_of(*[20 + i % 13 for i in range(64)])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ample = open_tiny(path, max_num_seqs=64).generate(prompts, params, use_tqdm=False)
    llm = open_tiny(path, max_num_seqs=64, num_gpu_blocks_override=38, max_model_len=76)
    tight = llm.generate(prompts, params, use_tqdm=False)
    assert llm.llm_engine.core.scheduler.num_preemptions > 0
    assert [o.outputs[0].token_ids for o in tight] == [o.outputs[0].token_ids for o in ample]
