"""FixedSizeTower: the base of vision encoders over square images of one size (images, tiles, frames)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.models.towers import Tower


class FixedSizeTower(Tower):
    """Base of towers that encode the square images, tiles or frames (squares) of all items in one batch.
    `pixels` of an item is [squares, 3, side, side]."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images [N, 3, side, side] to the vectors of the language model, [N, vectors, hidden]."""
        raise NotImplementedError

    def packed(self, modality: str, vectors: Tensor, item: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of an item in prompt order, [T, hidden]. `vectors` [squares, vectors, hidden]
        are those of its squares."""
        return vectors.flatten(0, 1)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        pixels = [item["pixels"] for item in items]
        vectors = self(torch.cat(pixels)).split([len(squares) for squares in pixels])
        return [self.packed(modality, part, item) for part, item in zip(vectors, items, strict=True)]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        side, count = self.facts.vit.image, max(1, num_vectors // self.facts.tokens)
        return {"pixels": torch.zeros(count, 3, side, side, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return item["pixels"][0]


def pixel_shuffle(x: Tensor, square: int) -> Tensor:
    """Concatenate each square of patches: [N, patches, hidden] of square images becomes
    [N, patches / square^2, hidden * square^2]."""
    side = round(x.shape[1] ** 0.5) // square
    grid = x.view(len(x), side, square, side, square, -1)
    return grid.transpose(2, 3).flatten(3).flatten(1, 2)
