"""Format: how a checkpoint's weights are kept."""

from typing import Protocol

from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.weight import LinearShape, Weight


class Format(Protocol):
    """Makes the weights of layers, each from the names of the parts of the checkpoint that it is made of."""

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight: ...

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        """All experts of a layer are in each part."""
        ...
