"""Random weights: a model without weight files, for benchmarks."""

import re
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.checkpoint.model import Checkpoint
from quire.layers.scope import Target
from quire.loader.source import Source, put

_SPREAD = 0.02
_SCALE = 0.02
_POWER_OF_SCALE = 121
"""Value of the scales that a quantization format stores as biased exponents (127 stands for 1)."""
_NORM = re.compile(r"(norm|\bln_\w)\.weight$")


class DummySource(Source):
    """A source of random weights of any shape."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self._seed = seed

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {name: target.shape for name, target in targets.items()}

    def fill(self, target: Target) -> None:
        """Fill a tensor with values that depend on the seed and its name alone. Norms are 1; other weights
        are uniform around 0. Quantized values have random bits and constant scales. A shard is cut from the
        whole tensor, so that a model is the same however it is sharded."""
        name, into = target.name, target.tensor
        if not target.is_whole:
            full = Target(name, _empty_like(into, target.shape))
            self.fill(full)
            put(full.tensor, target)
            return
        if _NORM.search(name):
            into.fill_(1.0)
            return
        # The CPU generator uses only 32 bits of a seed.
        generator = torch.Generator(into.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if "scale" in name.rpartition(".")[2]:
            scale = 1 / _SCALE if name.endswith("weight_global_scale") else _SCALE  # values are divided by it
            into.fill_(scale if into.is_floating_point() else _POWER_OF_SCALE)
        elif name.endswith("g_idx") or target.is_text:
            into.zero_()
        elif not into.is_floating_point():
            limits = torch.iinfo(into.dtype)
            into.random_(limits.min, limits.max, generator=generator)
        elif into.dtype.itemsize == 1:
            into.copy_(torch.empty_like(into, dtype=torch.float16).uniform_(-1, 1, generator=generator))
        else:
            into.uniform_(-_SPREAD, _SPREAD, generator=generator)


def _empty_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor of this shape with its axes in the same memory order."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    empty = torch.empty([shape[axis] for axis in order], dtype=tensor.dtype, device=tensor.device)
    return empty.permute(*(order.index(axis) for axis in range(tensor.ndim)))
