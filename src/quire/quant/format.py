"""Format: the storage format of a checkpoint's weights."""

from typing import Protocol

from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.weight import LinearShape, Weight


class Format(Protocol):
    """Builds empty weights of layers. `parts` are the checkpoint names of the projections that a layer
    combines, such as those of queries, keys and values."""

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight: ...

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        """Build all experts of a layer; each name in `parts` stands for a projection of all experts."""
