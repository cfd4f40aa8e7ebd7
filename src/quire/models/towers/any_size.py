"""AnySizeTower: the base of vision encoders over images of any size, and functions of grids of patches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from quire.layers.vision import patches_of
from quire.models.towers import Tower

Grid = tuple[int, int]
"""Rows and columns of patches, or of merged patches."""


def grid_of(images: Tensor, patch: int) -> Grid:
    """Return the rows and columns of patches in images [..., height, width]. `patch` is the side of a patch
    in pixels."""
    return images.shape[-2] // patch, images.shape[-1] // patch


def channel_last_patches(images: Tensor, patch: int) -> Tensor:
    """Split images [N, 3, height, width] into [patches, patch * patch * 3] with the channel last."""
    patches = patches_of(images, patch).flatten(0, 1).unflatten(1, (3, patch**2))
    return patches.transpose(1, 2).flatten(1)


def squares_of(x: Tensor, grids: Sequence[Grid], merge: int) -> Tensor:
    """Group the patches x [T, hidden] of all grids into squares of `merge` x `merge` patches, [T / merge^2,
    merge^2, hidden]."""
    parts = x.split([math.prod(grid) for grid in grids])
    squares = [
        part.view(rows // merge, merge, columns // merge, merge, -1).transpose(1, 2).flatten(0, 1)
        for part, (rows, columns) in zip(parts, grids, strict=True)
    ]
    return torch.cat(squares).flatten(1, 2)


def split_by_item(vectors: Tensor, counts: Iterable[int], num_images: Iterable[int]) -> list[Tensor]:
    """Split the vectors of all images by item. `counts` are the numbers of vectors of the images, and
    `num_images` the numbers of images of the items."""
    remaining = iter(counts)
    return list(vectors.split([sum(islice(remaining, count)) for count in num_images]))


class AnySizeTower(Tower):
    """Base of towers over images of any size, which encode all items in one batch. An item has arrays, each
    of which is an image or a stack of images of one shape."""

    arrays: tuple[str, ...] = ("pixels",)
    """Names of the arrays of an item."""

    def stacks(self, item: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the images of an item as stacks of images of one shape, [images, 3, height, width], in
        prompt order."""
        raise NotImplementedError

    def encode_images(self, stacks: list[Tensor], grids: list[Grid]) -> tuple[Tensor, list[int]]:
        """Encode all images of `stacks`; `grids` are the grids of patches of the images. Return the vectors
        of all images, and the number of vectors of each image."""
        raise NotImplementedError

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        by_item = [self.stacks(item) for item in items]
        stacks = [stack for item_stacks in by_item for stack in item_stacks]
        grids = [grid_of(stack, self.facts.vit.patch) for stack in stacks for _ in range(len(stack))]
        vectors, counts = self.encode_images(stacks, grids)
        return split_by_item(vectors, counts, [sum(map(len, item_stacks)) for item_stacks in by_item])

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """Return a blank image, about square, of at least `num_vectors` vectors."""
        rows, unit = max(1, int(num_vectors**0.5)), self.facts.patch * self.facts.merge
        columns = -(-num_vectors // rows)
        return {"pixels": torch.zeros(3, rows * unit, columns * unit, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        cost, vit = 0, getattr(self.facts, "vit", self.facts)
        for *many, _, height, width in (item[name] for name in self.arrays if name in item):
            count = height * width // vit.patch**2
            cost += math.prod(many) * count * (6 * vit.hidden + count)
        return cost
