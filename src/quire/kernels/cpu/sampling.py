"""Token sampling in C (`csrc/sampling.c`). The reference in torch is `sampling/random.py`."""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cpu.native import TYPES, Kernel, c_function

MAX_VOCAB = 1 << 20
_TASK_VOCAB = 4096
"""Vocabulary entries per task, equal to that in sampling.c."""

_sample = Kernel(
    "quire_sample",
    "out x found memory temperature top_k top_p min_p seeds positions mask_of masks",
    "num_rows size stride bf16 num_words",
)
FREE = -1
"""Value of `ConstrainedHost.mask_of` for rows without a mask."""


class ConstrainedHost(NamedTuple):
    """Token masks of N rows of logits; rows may have none."""

    mask_of: Tensor
    """[N] int32, index of the mask of each row, or FREE."""
    masks: Tensor
    """[masks, words] int32, one bit per token, 1 if it is allowed; tokens after the last word are not."""


@functools.cache
def _scratch_size() -> Callable[[int], int]:
    return c_function("quire_sample_room", ctypes.c_int64, ctypes.c_int64)


def argmax(logits: Tensor) -> Tensor:
    """Return the index [N] int64 of the first maximum of each row of logits [N, V]; NaN is the largest."""
    return _run(logits)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    constrained: ConstrainedHost | None = None,
) -> Tensor:
    """Sample a token id [N] int64 from each row of logits [N, V]. The other tensors are [N], with the dtypes
    of `sampling.random.SamplingTensors`. Temperature 0 is greedy. `constrained` masks disallowed tokens."""
    return _run(logits, temperature, top_k, top_p, min_p, seeds, positions, constrained=constrained)


def _run(logits: Tensor, *params: Tensor, constrained: ConstrainedHost | None = None) -> Tensor:
    logits = logits if logits.dtype in TYPES else logits.float()
    assert logits.stride(1) == 1
    num_rows, size = logits.shape
    assert size <= MAX_VOCAB
    out = torch.empty(num_rows, dtype=torch.int64)
    best = torch.empty(num_rows * -(-size // _TASK_VOCAB), dtype=torch.float32)
    memory = torch.empty(torch.get_num_threads() * _scratch_size()(size) if params else 0, dtype=torch.uint8)
    num_words = 0 if constrained is None else constrained.masks.shape[1]
    assert constrained is None or all(tensor.is_contiguous() for tensor in constrained)
    is_bf16 = logits.dtype == torch.bfloat16
    tensors = [out, logits, best, memory, *(params or [None] * 6), *(constrained or [None] * 2)]
    _sample(tensors, num_rows, size, logits.stride(0), is_bf16, num_words)
    return out
