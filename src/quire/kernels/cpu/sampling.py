"""Sampling tokens in C (`csrc/sampling.c`) on a CPU. The reference in torch is `sampling/random.py`."""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from quire.kernels.cpu.native import TYPES, Kernel, library, structure

MAX_VOCAB = 1 << 20
_VOCAB = 4096
"""As in sampling.c."""

_sample = Kernel("quire_sample")
_Job = structure(
    "out x found memory temperature top_k top_p min_p seeds positions mask_of masks",
    "num_rows size stride bf16 num_words",
)
FREE = -1


class ConstrainedHost(NamedTuple):
    """What N rows may sample, where that is not everything."""

    mask_of: Tensor
    """[N] int32 which mask a row has, or FREE"""
    masks: Tensor
    """[masks, words] int32: a bit for each token; those behind the last word are out"""


@functools.cache
def _room() -> Callable[[int], int]:
    loaded = library()
    assert loaded is not None, "ask library() first"
    function = loaded["quire_sample_room"]
    function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    return cast(Callable[[int], int], function)


def argmax(logits: Tensor) -> Tensor:
    """[N, V] -> [N] int64: the first of the largest; a NaN is larger than any number, as in torch."""
    return _sampled(logits)


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
    """[N, V] -> [N] int64. The others are [N] and of the types of `sampling.chance.Asked`;
    a temperature of 0 takes the best. For `constrained` rows, disallowed tokens count as minus infinity."""
    return _sampled(logits, temperature, top_k, top_p, min_p, seeds, positions, constrained=constrained)


def _sampled(logits: Tensor, *asked: Tensor, constrained: ConstrainedHost | None = None) -> Tensor:
    logits = logits if logits.dtype in TYPES else logits.float()
    assert logits.stride(1) == 1
    num_rows, size = logits.shape
    assert size <= MAX_VOCAB
    out = torch.empty(num_rows, dtype=torch.int64)
    found = torch.empty(num_rows * -(-size // _VOCAB), dtype=torch.float32)
    memory = torch.empty(torch.get_num_threads() * _room()(size) if asked else 0, dtype=torch.uint8)
    pointers = [column.data_ptr() for column in asked] if asked else [None] * 6
    num_words = 0 if constrained is None else constrained.masks.shape[1]
    assert constrained is None or all(each.is_contiguous() for each in constrained)
    job = _Job(
        out.data_ptr(),
        logits.data_ptr(),
        found.data_ptr(),
        memory.data_ptr(),
        *pointers,
        *([None] * 2 if constrained is None else [each.data_ptr() for each in constrained]),
        num_rows,
        size,
        logits.stride(0),
        logits.dtype == torch.bfloat16,
        num_words,
    )
    _sample(job, out, logits, found, memory, *asked, *(constrained or ()))
    return out
