"""Tiny engines on a GPU, steps of every kind, and how far their logits are off."""

import gc
from pathlib import Path
from typing import Any

import torch
from tiny import open_tiny, prompts_of
from torch import Tensor

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "block_size": 16,
    "num_gpu_blocks_override": 100,
    "enable_prefix_caching": False,
}
COUNTS = (10, 8, 6, 3)
"""Tokens of each answer: batches of 4, 3, 2 and 1, of which the second is padded."""
ROUNDING = 0.5
"""How far the worst logit of a step is off in the median, in deviations of all its logits. Measured: 0.02 to
0.18 on a CPU, and with transformers alike; 4 if all are wrong."""


def opened(path: Path, dtype: str, **more: Any) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return open_tiny(path, dtype=dtype, **SETTINGS, **more)


def answers(llm: LLM) -> list[RequestOutput]:
    """Two whole prompts with the first half of a third, its other half and the fourth beside decodes, and
    decodes alone."""
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=-1) for count in COUNTS
    ]
    return llm.generate(prompts_of(23, 9, 40, 5), params, use_tqdm=False)


def distances(ours: Tensor, theirs: Tensor) -> list[float]:
    """Of the worst logit of each step, in deviations."""
    apart: list[float] = ((ours - theirs).abs().amax(-1) / theirs.std(-1)).tolist()
    return apart
