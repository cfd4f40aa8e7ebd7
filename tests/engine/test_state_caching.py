"""Tests of prefix caching in models with SSM states: answers after a hit equal those without one."""

from pathlib import Path

import pytest
import torch
from cuda_on_cpu import use_fake_device
from lora_oracle import save_adapter
from oracle import make_tiny
from tiny import check_against, generate, generate_preempted, logits_of, open_tiny, prompts_of

from quire import LLM, LoRARequest, SamplingParams
from quire.checkpoint.families import FAMILIES, lfm, linear_attention, ssm
from quire.checkpoint.layout import cache_specs, layout
from quire.data.outputs import RequestOutput
from quire.kernels.cpu import native

_MODULES = {module.__name__ for module in (lfm, linear_attention, ssm)}
WITH_STATES = [name for name, family in FAMILIES.items() if family.read.__module__ in _MODULES]
KINDS = {
    "FalconH1ForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Mamba2ForCausalLM",
    "MiniMaxForCausalLM",
    "Qwen3NextForCausalLM",
}
"""One family for each kind of state; test_parity.py has hits of all families against transformers."""
NEAR = 1e-5 if native.library() else 1e-4
"""Tolerance of logits: torch's sums depend on the number of rows, those of the C kernels do not."""
EVERY_8 = {"enable_prefix_caching": True, "mamba_block_size": 8, "prefix_cache_retention_interval": 8}


def without_hits(
    llm: LLM, prompts: list[list[int]], count: int, lora: LoRARequest | None = None
) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logprobs=-1, skip_reading_prefix_cache=True
    )
    return llm.generate(prompts, params, lora_request=lora, use_tqdm=False)


def cached(outputs: list[RequestOutput]) -> list[int | None]:
    return [output.num_cached_tokens for output in outputs]


def check_equal(hits: list[RequestOutput], misses: list[RequestOutput]) -> None:
    assert cached(misses) == [0] * len(misses)
    for hit, miss in zip(hits, misses, strict=True):
        assert hit.outputs[0].token_ids == miss.outputs[0].token_ids
        torch.testing.assert_close(logits_of(hit), logits_of(miss), atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in WITH_STATES],
)
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


def test_hits_after_preemption_and_reset(tmp_path: Path) -> None:
    path, hf_model = make_tiny("qwen3_next", tmp_path)
    llm = open_tiny(path, max_num_batched_tokens=16, max_num_seqs=4, **EVERY_8)
    prompts = prompts_of(27, 19)
    check_against(hf_model, generate_preempted(llm, prompts, count=6, at=(2, 5, 7)))
    assert cached(generate(llm, prompts)) == [24, 16]
    assert llm.reset_prefix_cache()
    outputs = generate(llm, prompts)
    assert cached(outputs) == [0, 0]
    check_against(hf_model, outputs)


def test_checkpoints_of_an_8_bit_cache(tmp_path: Path) -> None:
    """Check that pages and states are restored alike if pages have another dtype."""
    path, _ = make_tiny("FalconH1ForCausalLM", tmp_path)
    llm = open_tiny(path, kv_cache_dtype="fp8", **EVERY_8)
    prompts = prompts_of(27, 19)
    generate(llm, prompts, count=1)
    hits = generate(llm, prompts)
    assert cached(hits) == [24, 16]
    check_equal(hits, without_hits(llm, prompts, count=6))


def test_checkpoints_of_adapters_are_separate(tmp_path: Path) -> None:
    path, hf_model = make_tiny("qwen3_next", tmp_path)
    adapters = [LoRARequest(name, at, str(tmp_path / name)) for at, name in enumerate("ab", 1)]
    for lora in adapters:
        layers = ["q_proj", "out_proj", "in_proj_qkvz"]
        save_adapter(hf_model, Path(lora.lora_path), lora.lora_int_id, r=4, target_modules=layers).unload()
    llm = open_tiny(path, enable_lora=True, max_loras=2, max_lora_rank=8, **EVERY_8)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1)
    (prompt,) = prompts_of(27)
    answers = list[RequestOutput]()
    for lora, hits in zip((None, *adapters) * 2, (0, 0, 0, 24, 24, 24), strict=True):
        (hit,) = llm.generate([prompt], params, lora_request=lora, use_tqdm=False)
        assert cached([hit]) == [hits]
        check_equal([hit], without_hits(llm, [prompt], 3, lora))
        answers.append(hit)
    assert (logits_of(answers[1]) - logits_of(answers[2])).abs().max() > 0.01, "the adapters are alike"


def test_prefix_caching_is_off_by_default_without_attention(tmp_path: Path) -> None:
    path, _ = make_tiny("mamba", tmp_path)
    assert not open_tiny(path).config.cache.enable_prefix_caching
    path, _ = make_tiny("jamba", tmp_path)
    llm = open_tiny(path)
    cache = llm.config.cache
    assert cache.enable_prefix_caching and (cache.mamba_cache_mode, cache.mamba_block_size) == ("align", 64)
    assert llm.llm_engine.core.scheduler.kv.states is not None


def test_no_memory_for_checkpoints_turns_prefix_caching_off(tmp_path: Path) -> None:
    path, hf_model = make_tiny("jamba", tmp_path)
    rows = open_tiny(path, max_num_seqs=4).config
    room = layout(cache_specs(rows.checkpoint.facts), 64)
    needed = room.row_bytes(4) * 5 + room.block_bytes(4, 4) * 17
    llm = open_tiny(path, max_num_seqs=4, max_model_len=64, kv_cache_memory_bytes=needed)
    assert llm.llm_engine.core.scheduler.kv.states is None
    for _ in range(2):
        outputs = generate(llm, prompts_of(40))
        check_against(hf_model, outputs)
        assert cached(outputs) == [0]


def test_sleeping_engine_forgets_checkpoints(tmp_path: Path) -> None:
    path, hf_model = make_tiny("lfm2", tmp_path)
    llm = open_tiny(path, enable_sleep_mode=True, **EVERY_8)
    prompts = prompts_of(27)
    generate(llm, prompts)
    llm.sleep(1)
    llm.wake_up()
    for expected in (0, 24):
        outputs = generate(llm, prompts)
        assert cached(outputs) == [expected]
        check_against(hf_model, outputs)


def test_hits_in_graphs_ahead_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that states are copied in the order of the steps if the next is planned before the last ends."""
    path, hf_model = make_tiny("qwen3_next", tmp_path)
    use_fake_device(monkeypatch)
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 200}
    llm = open_tiny(path, max_num_batched_tokens=24, **sizes, **EVERY_8)
    llm.llm_engine.core.step_queue.depth = 2
    (common,) = prompts_of(19)
    prompts = [common + tail for tail in prompts_of(1, 2, 9, 14, 7, seed=8)]
    for hits in ([0, 16, 16, 16, 16], [16, 16, 24, 32, 24]):
        outputs = generate(llm, prompts)
        assert cached(outputs) == hits
        check_against(hf_model, outputs)
