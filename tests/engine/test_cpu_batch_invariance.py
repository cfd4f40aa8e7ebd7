"""Tests of `batch_invariant` on a CPU. Only latent attention and its sparse indexer depend on it there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from invariance_cases import check_mixed, check_needle, check_one_by_one
from oracle import make_tiny
from tiny import logits_of, open_tiny, prompts_of

from quire import SamplingParams
from quire.attention import cpu_mla
from quire.errors import ConfigError
from quire.kernels import batch_invariant
from quire.kernels.cpu import native

needs_native = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
LENGTH = 75


@pytest.fixture(autouse=True)
def _switched_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariant, "_switch", {"on": False})


@needs_native
@pytest.mark.parametrize(
    ("family", "is_fixed"), [("deepseek_v3", True), ("deepseek_v3", False), ("glm_moe_dsa", True)]
)
def test_chunks_of_a_prompt_do_not_change_the_bits(
    family: str, is_fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a prompt in one chunk, which would be expanded without the setting, and in chunks that depend on
    other requests."""
    monkeypatch.setattr(cpu_mla, "FEW_QUERIES", 24)
    path, _ = make_tiny(family, tmp_path)
    prompts = prompts_of(LENGTH, 30, 9, 61)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1)
    results = []
    for num_tokens, beside in ((256, 0), (20, 0), (33, 3)):
        more: dict[str, Any] = {"enable_prefix_caching": False, "batch_invariant": is_fixed}
        llm = open_tiny(path, max_num_batched_tokens=num_tokens, max_num_seqs=8, **more)
        outputs = llm.generate(prompts[: beside + 1][::-1], params, use_tqdm=False)
        results.append(logits_of(outputs[-1]))
        llm.llm_engine.close()
    is_equal = all(torch.equal(result, results[0]) for result in results)
    assert is_equal is is_fixed


@needs_native
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("qwen3_moe", "float32"),
        ("gemma2", "float32"),
        ("deepseek_v3", "float32"),
        ("Qwen3NextForCausalLM", "float32"),
    ],
)
def test_requests_alone_and_among_others(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a prompt among random batches, prompts with logprobs, and prompts that arrive during decodes."""
    monkeypatch.setattr(cpu_mla, "FEW_QUERIES", 24)
    path, _ = make_tiny(family, tmp_path)
    settings = {"dtype": dtype, "batch_invariant": True, "max_num_batched_tokens": 64, "max_num_seqs": 12}
    llm = open_tiny(path, num_gpu_blocks_override=600, **settings)
    check_needle(llm, LENGTH, trials=4, most=10)
    check_mixed(llm, LENGTH)
    llm.llm_engine.close()
    llm = open_tiny(path, num_gpu_blocks_override=600, logprobs_mode="raw_logprobs", **settings)
    check_one_by_one(llm, 10)
    llm.llm_engine.close()


@needs_native
def test_latent_attention_can_differ_without_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the cases above can fail."""
    monkeypatch.setattr(cpu_mla, "FEW_QUERIES", 24)
    path, _ = make_tiny("deepseek_v3", tmp_path)
    llm = open_tiny(path, num_gpu_blocks_override=600, max_num_batched_tokens=64, max_num_seqs=12)
    with pytest.raises(AssertionError, match="trial"):
        check_needle(llm, LENGTH, trials=4, most=10)
    with pytest.raises(AssertionError, match="request"):
        check_mixed(llm, LENGTH)
    llm.llm_engine.close()


@needs_native
@pytest.mark.parametrize(
    ("family", "overrides", "settings", "reason"),
    [
        ("deepseek_v3", {"kv_lora_rank": 12}, {}, r"a latent of 12 \+ 8 elements is not a multiple of 8"),
        ("llama", {"hidden_size": 48, "head_dim": 12}, {}, "the attention backend is TORCH_SDPA"),
        ("llama", {}, {"attention_backend": "TORCH_SDPA"}, "the attention backend is TORCH_SDPA"),
        ("llama", {}, {"dtype": "float16"}, "the C kernels are not available for torch.float16 here"),
        ("llama", {}, {"model_impl": "transformers"}, "the code of transformers selects its own kernels"),
    ],
)
def test_models_that_run_in_torch_are_refused(
    family: str, overrides: dict[str, Any], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Catches a mode that is accepted for kernels of torch, which add in another order in a larger batch."""
    path, _ = make_tiny(family, tmp_path, **overrides)
    with pytest.raises(ConfigError, match=f"batch_invariant is not supported for .* on this CPU: {reason}"):
        open_tiny(path, batch_invariant=True, **settings)


def test_mode_is_refused_without_the_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(ConfigError, match="the C kernels are not available for torch.float32 here"):
        open_tiny(make_tiny("llama", tmp_path)[0], batch_invariant=True)
