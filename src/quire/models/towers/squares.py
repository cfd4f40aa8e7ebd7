"""What towers share that see squares of one size: an image, its tiles, the frames of a video."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts, MediaFacts
from quire.layers.scope import Scope


class FixedSizeTower(nn.Module):
    """All squares of all items in one batch. `pixels` of an item are [squares, 3, side, side]."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.media is not None
        self.facts: Any = facts.media.tower
        self.device = scope.device

    @staticmethod
    def divides(media: MediaFacts, count: int) -> bool:
        """Whether so many devices can share its layers."""
        return bool(media.tower.vit.heads % count == 0)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, side, side] -> [N, vectors, hidden]"""
        raise NotImplementedError

    def packed(self, modality: str, vectors: Tensor, item: Mapping[str, Tensor]) -> Tensor:
        """Those of an item's squares, [squares, vectors, hidden], as they stand in the prompt."""
        return vectors.flatten(0, 1)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        pixels = [item["pixels"] for item in items]
        vectors = self(torch.cat(pixels)).split([len(each) for each in pixels])
        return [self.packed(modality, part, item) for part, item in zip(vectors, items, strict=True)]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        side, count = self.facts.vit.image, max(1, num_vectors // self.facts.tokens)
        return {"pixels": torch.zeros(count, 3, side, side, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return item["pixels"][0]


def gathered(x: Tensor, square: int) -> Tensor:
    """[N, patches, hidden] of square images -> [N, fewer, hidden * square * square]: those of each square of
    patches side by side."""
    side = round(x.shape[1] ** 0.5) // square
    grid = x.view(len(x), side, square, side, square, -1)
    return grid.transpose(2, 3).flatten(3).flatten(1, 2)
