"""Images as a grid of square tiles, followed by the whole image: the base of InternVL, Aya and others."""

from collections.abc import Collection
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.reader import ConfigReader
from quire.errors import RequestError
from quire.multimodal.images import IMAGE_ARGUMENTS, PixelScaling, Size, count_of, tiled
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor


@lru_cache(maxsize=16)
def grids(least: int, most: int) -> list[Size]:
    """Return all grids (columns, rows) of `least` to `most` tiles, ordered by their number of tiles."""
    sides = range(1, most + 1)
    every = [(wide, high) for wide in sides for high in sides if least <= wide * high <= most]
    return sorted(every, key=lambda grid: grid[0] * grid[1])


def nearest_grid(image: Size, side: int, least: int, most: int) -> Size:
    """Return the rows and columns of tiles with the aspect ratio nearest to the image's. Of several such
    grids, a larger one is chosen if the image has more than half of its pixels."""
    height, width = image
    nearest, best = float("inf"), (1, 1)
    for columns, rows in grids(least, most):
        away = abs(width / height - columns / rows)
        if away < nearest or (away == nearest and width * height > 0.5 * side * side * columns * rows):
            nearest, best = away, (rows, columns)
    return best


class TiledProcessor(ImageProcessor):
    """Base of processors that cut an image into at most `max_patches` tiles, and append the whole image."""

    arguments: ClassVar[Collection[str]] = (*IMAGE_ARGUMENTS, "crop_to_patches", "min_patches", "max_patches")

    def span(self, num_tiles: int) -> list[int]:
        """Return the tokens of an image with this number of tiles, of which the last is the whole image."""
        raise NotImplementedError

    def grid(self, image: Size, keys: ConfigReader, least: int, most: int) -> Size:
        """Return the rows and columns of tiles of an image, between `least` and `most` tiles in all."""
        return nearest_grid(image, self.facts.vit.image, least, most)

    def grid_of(self, image: Image.Image, keys: ConfigReader) -> Size:
        """Return the rows and columns of tiles of an image, as the settings allow; 1 and 1 without tiling."""
        most = count_of(keys, "max_patches", 12)
        if not keys.flag("crop_to_patches") or most == 1:
            return 1, 1
        return self.grid(image.size[::-1], keys, keys.size("min_patches", 1), most)

    def cut(self, image: Image.Image, grid: Size, keys: ConfigReader) -> NDArray[np.uint8]:
        """Return the tiles of an image row by row: [tiles, side, side, 3]."""
        side = self.facts.vit.image
        return tiled(self.resize(image, (grid[0] * side, grid[1] * side), keys), (side, side))

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        tiles = self.cut(image, self.grid_of(image, keys), keys)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, self.resize_to_square(image, keys)[None]))
        return self.build_item(self.span(len(tiles)), arrays=scaling(tiles))

    def embeds_span(self, num_vectors: int) -> list[int]:
        if num_vectors % self.facts.tokens:
            many = f"a multiple of {self.facts.tokens}"
            raise RequestError(f"image_embeds: {num_vectors} vectors, expected {many}", "multi_modal_data")
        return self.span(num_vectors // self.facts.tokens)

    @property
    def max_tiles(self) -> int:
        """Return the maximum number of tiles of an image, not counting the whole image."""
        return self.settings.size("max_patches", 12) if self.settings.flag("crop_to_patches") else 1

    def max_vectors(self, modality: str) -> int:
        tokens: int = self.facts.tokens
        return tokens * (self.max_tiles + (self.max_tiles > 1))

    def largest(self, modality: str) -> tuple[int, ...]:
        return self.facts.vit.image * self.max_tiles, self.facts.vit.image
