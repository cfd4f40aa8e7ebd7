"""Random weights: a model without weight files, for measuring."""

import re
import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from quire.checkpoint.model import Checkpoint
from quire.layers.scope import Target
from quire.loader.source import put
from quire.quant.format import Format

_SPREAD = 0.02
_SCALE = 0.02
_POWER_OF_SCALE = 121
"""Of a scale that is stored as its exponent, from 127 on."""
_NORM = re.compile(r"(norm|\bln_\w)\.weight$")


class DummySource:
    """Random weights of the shapes asked for."""

    num_readers = 1

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self._seed = seed

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {name: target.shape for name, target in targets.items()}

    def order(self, targets: Mapping[str, Target]) -> Iterable[str]:
        return targets

    def format(self, plain: Format) -> Format:
        return plain

    def fill(self, target: Target) -> None:
        """Norms are 1, all else is uniform around 0; a function of the seed and the name alone. Of what is
        quantized the bits are, and scales are alike. A share is made out of the whole, so that a model is the
        same however it is divided."""
        name, into = target.name, target.tensor
        if not target.is_whole:
            whole = Target(name, _alike(into, target.shape))
            self.fill(whole)
            put(whole.tensor, target)
            return
        if _NORM.search(name):
            into.fill_(1.0)
            return
        # The CPU generator reads 32 bits of a seed, no more.
        generator = torch.Generator(into.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if "scale" in name.rpartition(".")[2]:
            into.fill_(_SCALE if into.is_floating_point() else _POWER_OF_SCALE)
        elif name.endswith("g_idx") or target.is_text:
            into.zero_()
        elif not into.is_floating_point():
            limits = torch.iinfo(into.dtype)
            into.random_(limits.min, limits.max, generator=generator)
        elif into.dtype.itemsize == 1:
            into.copy_(torch.empty_like(into, dtype=torch.float16).uniform_(-1, 1, generator=generator))
        else:
            into.uniform_(-_SPREAD, _SPREAD, generator=generator)


def _alike(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unfilled, with axes in the same order of memory."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    made = torch.empty([shape[axis] for axis in order], dtype=tensor.dtype, device=tensor.device)
    return made.permute(*(order.index(axis) for axis in range(tensor.ndim)))
