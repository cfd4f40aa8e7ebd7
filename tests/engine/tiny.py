"""Tiny models as whole engines, and the check of every logit against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

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


@torch.inference_mode()
def check_against(hf_model: Any, outputs: list[RequestOutput]) -> None:
    """Every logit of every step is within the tolerance, and every token is transformers' own greedy
    choice."""
    for output in outputs:
        prompt, said = output.prompt_token_ids, list(output.outputs[0].token_ids)
        expected = hf_model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        for step, position in enumerate(output.outputs[0].logprobs):
            ours = torch.tensor([position[id].logprob for id in range(len(position))])
            difference = (ours - expected[step]).abs().max().item()
            assert difference < TOLERANCE, (
                f"prompt of {len(prompt)}, step {step}: logits differ by {difference}"
            )
        assert said == expected.argmax(-1).tolist(), f"prompt of {len(prompt)}"
