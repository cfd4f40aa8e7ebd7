"""Towers: images, videos and sounds become vectors that stand among those of tokens. One line a family."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from quire.registry import LazyTable


class Tower(Protocol):
    """All that a model has to see or to hear with; made as `TOWERS[family](facts, scope)`."""

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The vectors of each item, [num_vectors, hidden * (1 + levels)], of all in one batch: `items` are
        their arrays, on the device, by the names that the family's processor gave them."""

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """An item of about so many vectors, for measuring what it takes."""

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        """What an item takes, by the shapes of its arrays: items are spread over devices by it."""


TOWERS = LazyTable("tower", {})
