"""Format: the storage format of a checkpoint's weights."""

from typing import Protocol

from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.weight import LinearShape, Weight


class Format(Protocol):
    """Builds the weights of layers from the names of their parts in the checkpoint."""

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight: ...

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        """Build all experts of a layer; each part contains all of them."""
