"""Tiny models as whole engines, and the check of every logit against transformers."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput

TOLERANCE = 1e-3


def open_tiny(path: Path, **settings: Any) -> LLM:
    """An engine over token ids that gives out all its logits."""
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
    """The same, but the request that came first is preempted before each of these steps."""
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


def check_against(
    hf_model: Any, outputs: list[RequestOutput], tolerance: float = TOLERANCE, ties: float = 0.0
) -> None:
    """Every logit of every step is within the tolerance of that of transformers, and every token has the
    largest of our logits, or one within `ties` of it. Which of two tokens is the choice of transformers may
    hang on the last bit where their logits are nearly equal: it is not asked."""
    for output in outputs:
        prompt, said = f"prompt of {len(output.prompt_token_ids)}", output.outputs[0].token_ids
        ours, expected = logits_of(output), expected_of(hf_model, output)
        apart = (ours - expected).abs().amax(-1)
        assert (apart < tolerance).all(), f"{prompt}: logits of each step differ by {apart.tolist()}"
        chosen = ours.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert (ours.amax(-1) - chosen <= ties).all(), f"{prompt}: {said}"


def logits_of(output: RequestOutput) -> Tensor:
    """[steps, vocab] of what was said."""
    steps: list[Any] = output.outputs[0].logprobs  # type: ignore[assignment]
    return torch.tensor([[step[id].logprob for id in range(len(step))] for step in steps])


def expected_of(hf_model: Any, output: RequestOutput) -> Tensor:
    """The same as transformers has it, after the same tokens."""
    prompt, said = output.prompt_token_ids, output.outputs[0].token_ids
    return _logits(hf_model, (*prompt, *said))[len(prompt) - 1 : -1]


@lru_cache(100)
@torch.inference_mode()
def _logits(hf_model: Any, token_ids: tuple[int, ...]) -> Tensor:
    logits: Tensor = hf_model(torch.tensor([token_ids])).logits[0]
    return logits
