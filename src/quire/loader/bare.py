"""Checkpoints that were saved from the body of a model alone, or long ago: the same tensors, other names."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from quire.loader.source import Source
from quire.quant.experts import ExpertMethod
from quire.quant.method import LinearMethod

_OLD = {".gamma": ".weight", ".beta": ".bias"}
"""How the first norms were named."""


class Renamed:
    """A source under the names that the model asks for."""

    def __init__(self, source: Source, stored: Mapping[str, str]) -> None:
        self._source = source
        self._stored = stored
        """By the model's name: the one in the file."""
        self._own = {theirs: ours for ours, theirs in stored.items()}

    def shapes(self, targets: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        return {self._own.get(name, name): shape for name, shape in self._source.shapes(targets).items()}

    def order(self, targets: Mapping[str, Tensor]) -> Iterable[str]:
        theirs = {self._stored.get(name, name): tensor for name, tensor in targets.items()}
        return [self._own.get(name, name) for name in self._source.order(theirs)]

    def linear(self, parts: tuple[str, ...], device: torch.device) -> LinearMethod:
        return self._source.linear(tuple(self._stored.get(part, part) for part in parts), device)

    def experts(self, parts: tuple[str, ...], device: torch.device) -> ExpertMethod:
        return self._source.experts(tuple(self._stored.get(part, part) for part in parts), device)

    def fill(self, name: str, into: Tensor) -> None:
        self._source.fill(self._stored.get(name, name), into)


def renamed(source: Source, targets: Mapping[str, Tensor]) -> Source:
    """`source`, with the names of its tensors as the model has them."""
    shapes = source.shapes(targets)
    missing = [name for name in targets if name not in shapes]
    found = {name: theirs for name in missing for theirs in _other_names(name) if theirs in shapes}
    return Renamed(source, found) if found else source


def _other_names(name: str) -> list[str]:
    """Without the first part, and as it was called before."""
    names = [name, name.partition(".")[2]]
    for old, new in _OLD.items():
        if name.endswith(new):
            names += [each.removesuffix(new) + old for each in names]
    return names
