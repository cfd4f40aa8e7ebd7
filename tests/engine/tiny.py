"""Tiny models as whole engines, and checks of every logit against transformers."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import run_hf_batch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.checkpoint.layout import cache_specs, has_ssm_state
from quire.checkpoint.model import read_checkpoint
from quire.data.outputs import RequestOutput

TOLERANCE = 1e-3
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 80,
    "use_tqdm_on_load": False,
}
"""Settings of an engine over token ids with a small KV cache."""


def open_tiny(path: Path, **settings: Any) -> LLM:
    """Open an engine over token ids that returns all its logits."""
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits",
        "max_num_seqs": 40,
        "block_size": 4,
        "use_tqdm_on_load": False,
    }
    return LLM(str(path), **(defaults | settings))


def prompts_of(*lengths: int, vocab: int = 128, seed: int = 3) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, vocab, length).tolist() for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], count: int = 6) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=-1)
    return llm.generate(prompts, params, use_tqdm=False)


def generate_preempted(
    llm: LLM, prompts: list[list[int]], count: int, at: tuple[int, ...]
) -> list[RequestOutput]:
    """Generate while the oldest request is preempted before each of these steps."""
    engine, scheduler = llm.llm_engine, llm.llm_engine.core.scheduler
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=-1)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs, step = {}, 0
    while engine.has_unfinished_requests():
        if step in at:
            scheduler._preempt(int(scheduler.running.order[0]))
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    return [outputs[str(number)] for number in range(len(prompts))]


def caching_settings(path: Path) -> dict[str, Any]:
    """Return settings with which a model with SSM states keeps them after every block."""
    if not has_ssm_state(cache_specs(read_checkpoint(path).facts)):
        return {}
    return {"enable_prefix_caching": True, "mamba_block_size": 4, "prefix_cache_retention_interval": 4}


def check_mixed_schedule(path: Path, hf_model: Any) -> None:
    """Check every logit of an engine in one run with chunks, prefix hits and preemption."""
    llm = open_tiny(path, max_num_batched_tokens=11, max_num_seqs=4, **caching_settings(path))
    (common,) = prompts_of(9)
    prompts = [common + tail for tail in prompts_of(1, 10, 4, seed=8)] + prompts_of(1, 17)
    check_against(hf_model, generate_preempted(llm, prompts, count=5, at=(1, 4, 7)))
    assert llm.llm_engine.core.scheduler.num_preemptions >= 3
    second = generate(llm, prompts[:3], count=1)
    check_against(hf_model, second)
    assert llm.config.cache.enable_prefix_caching
    if None in llm.llm_engine.core.scheduler.kv.windows:
        assert [output.num_cached_tokens for output in second] == [8, 16, 12]


def check_against(
    hf_model: Any, outputs: list[RequestOutput], tolerance: float = TOLERANCE, ties: float = 0.0
) -> None:
    """Check every logit of every step against transformers, within the tolerance.

    Every token must have the largest of our logits, or one within `ties` of it. transformers' choice is not
    compared, since it depends on the last bit of nearly equal logits.
    """
    for output, expected in zip(outputs, expected_of_batch(hf_model, outputs), strict=True):
        prompt, answer = f"prompt of {len(output.prompt_token_ids)}", output.outputs[0].token_ids
        actual = logits_of(output)
        apart = (actual - expected).abs().amax(-1)
        assert (apart < tolerance).all(), f"{prompt}: logits of each step differ by {apart.tolist()}"
        chosen = actual.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (actual.amax(-1) - chosen <= ties).all(), f"{prompt}: {answer}"


def logits_of(output: RequestOutput) -> Tensor:
    """Return the logits [steps, vocab] of a generated output."""
    steps: list[Any] = output.outputs[0].logprobs  # type: ignore[assignment]
    return torch.tensor([[step[id].logprob for id in range(len(step))] for step in steps])


def expected_of(hf_model: Any, output: RequestOutput) -> Tensor:
    """Return transformers' logits after the same tokens."""
    return expected_of_batch(hf_model, [output])[0]


def expected_of_batch(hf_model: Any, outputs: list[RequestOutput]) -> list[Tensor]:
    token_ids = tuple((*output.prompt_token_ids, *output.outputs[0].token_ids) for output in outputs)
    starts = [len(output.prompt_token_ids) - 1 for output in outputs]
    return [logits[start:-1] for start, logits in zip(starts, _logits(hf_model, token_ids), strict=True)]


@lru_cache(8)
def _logits(hf_model: Any, token_ids: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return run_hf_batch(hf_model, token_ids)
