"""Tiny engines on a GPU, steps of every kind, and the errors of their logits."""

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
"""Output tokens per request: batches of 4, 3, 2 and 1, of which the second is padded."""
ROUNDING = 0.5
"""Limit of the median over steps of the worst logit error, in standard deviations of the logits. Measured:
0.02 to 0.18 on a CPU and with transformers; 4 if all are wrong.
"""


def opened(path: Path, dtype: str, **more: Any) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return open_tiny(path, **(SETTINGS | {"dtype": dtype} | more))


def answers(llm: LLM) -> list[RequestOutput]:
    """Generate with whole prompts beside half a prompt, prompts beside decodes, and decodes alone."""
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=-1) for count in COUNTS
    ]
    return llm.generate(prompts_of(23, 9, 40, 5), params, use_tqdm=False)


def distances(actual: Tensor, expected: Tensor) -> list[float]:
    """Return the worst logit error of each step, in standard deviations."""
    apart: list[float] = ((actual - expected).abs().amax(-1) / expected.std(-1)).tolist()
    return apart
