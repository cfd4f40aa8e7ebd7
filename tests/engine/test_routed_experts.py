"""Tests of returned experts: which experts each token of a request was routed to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import use_fake_device
from drafted import EagerPolicy
from oracle import make_tiny
from router_oracle import experts_of
from spec_reference import derive_reference, look_up_reference, verify_reference
from tiny import caching_settings, generate_preempted, open_tiny, prompts_of

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput
from quire.errors import RequestError
from quire.sched.spec import Drafting

SETTINGS: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "max_num_batched_tokens": 11,
    "max_num_seqs": 4,
}


def generate(llm: LLM, prompts: list[list[int]], count: int, **params: Any) -> list[RequestOutput]:
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)
    return llm.generate(prompts, greedy, use_tqdm=False)


def check(hf_model: Any, outputs: list[RequestOutput], start: int = 0) -> None:
    """Compare with the experts that transformers chooses for the same tokens. The order of the experts of a
    token has no meaning."""
    for output in outputs:
        actual = output.outputs[0].routed_experts
        expected = experts_of(hf_model, [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids])
        assert actual is not None and actual.dtype == np.uint8
        assert np.array_equal(np.sort(actual), np.sort(expected[start:-1])), output.request_id


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "longcat_flash"])
def test_experts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Check chunked prompts, preempted requests and prefix hits, also beside sliding windows and states."""
    path, hf_model = make_tiny(family, tmp_path)
    llm = open_tiny(path, **SETTINGS, **caching_settings(path))
    (common,) = prompts_of(9)
    prompts = [common + tail for tail in prompts_of(1, 10, 4, seed=8)] + prompts_of(1, 17)
    check(hf_model, generate_preempted(llm, prompts, count=5, at=(1, 4, 7)))
    assert llm.llm_engine.core.scheduler.num_preemptions >= 3
    second = generate(llm, prompts[:3], count=2)
    assert all(output.num_cached_tokens for output in second)
    check(hf_model, second)
    check(hf_model, generate(llm, prompts[1:3], count=3, routed_experts_prompt_start=7), start=7)


@pytest.mark.parametrize("drafted", [False, True])
def test_experts_on_a_device_that_runs_ahead(
    drafted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check graphs, with padding and with drafts that are rejected."""
    path, hf_model = make_tiny("qwen3_moe", tmp_path)
    use_fake_device(monkeypatch)
    here = "quire.worker.cuda.draft_verify."
    monkeypatch.setattr(here + "derive", derive_reference)
    monkeypatch.setattr(here + "verify", lambda *args: verify_reference(*args[:3], *args[5:]))
    monkeypatch.setattr(here + "look_up", lambda known, step, _, least: look_up_reference(known, step, least))
    drafts = (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
        if drafted
        else {}
    )
    llm = open_tiny(path, max_model_len=64, num_gpu_blocks_override=200, **SETTINGS, **drafts)
    core, pace = llm.llm_engine.core, EagerPolicy()
    core.step_queue.depth = 2
    if drafted:
        drafting = Drafting(pace, None, max_drafts=3, ahead=True, max_samples=512)  # type: ignore[arg-type]
        core.scheduler.admitter.drafting = drafting
    check(hf_model, generate(llm, [[5, 6, 7, 8] * 5, *prompts_of(9, 4)], count=30))
    assert not drafted or pace.num_drafts > pace.num_held > 0


def test_each_sequence_of_a_prompt_has_experts(tmp_path: Path) -> None:
    path, hf_model = make_tiny("qwen3_moe", tmp_path)
    llm = open_tiny(path, **SETTINGS)
    params = SamplingParams(n=2, temperature=1, seed=3, max_tokens=5, ignore_eos=True)
    (output,) = llm.generate(prompts_of(6), params, use_tqdm=False)
    first, second = output.outputs
    assert list(first.token_ids) != list(second.token_ids)
    for completion in (first, second):
        output.outputs = [completion]
        check(hf_model, [output])
    with pytest.raises(RequestError, match="must be less than the 6 tokens of the prompt, got 6"):
        generate(llm, prompts_of(6), count=1, routed_experts_prompt_start=6)


def test_experts_are_off_by_default(tmp_path: Path) -> None:
    llm = open_tiny(make_tiny("qwen3_moe", tmp_path)[0])
    (output,) = generate(llm, prompts_of(6), count=2)
    assert output.outputs[0].routed_experts is None
    with pytest.raises(RequestError, match="needs --enable-return-routed-experts"):
        generate(llm, prompts_of(6), count=2, routed_experts_prompt_start=1)
