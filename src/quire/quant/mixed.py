"""MixedWeight: the weight of a layer with parts in different formats."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quire.quant.weight import LinearShape, Piece, Weight


class MixedWeight(Weight):
    """A weight for each run of parts in the same format; their outputs are concatenated."""

    def __init__(self, shape: LinearShape, weights: list[Weight]) -> None:
        super().__init__(shape)
        self.weights = nn.ModuleList(weights)

    def _weights(self) -> list[Weight]:
        return [weight for weight in self.weights if isinstance(weight, Weight)]

    def parts(self) -> list[dict[str, Piece]]:
        return [part for weight in self._weights() for part in weight.parts()]

    def begin(self) -> None:
        for weight in self._weights():
            weight.begin()

    def reorder(self, orders: list[Tensor]) -> None:
        left = list(orders)
        for weight in self._weights():
            count = len(weight.shape.sizes_out)
            weight.reorder(left[:count])
            left = left[count:]

    def repack(self) -> None:
        for weight in self._weights():
            weight.finish()

    def find_kernels(self) -> None:
        self.product = partial(_concatenate, weights=self._weights())


def shapes_of(shape: LinearShape, counts: list[int]) -> list[LinearShape]:
    """Split the shape of a layer into shapes of `counts` parts each."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    cuts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [replace(shape, sizes_out=shape.sizes_out[cut], outputs=shape.outputs[cut]) for cut in cuts]


def _concatenate(x: Tensor, weights: list[Weight]) -> Tensor:
    return torch.cat([weight.product(x) for weight in weights], 1)
