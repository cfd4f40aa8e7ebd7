"""DeepSeek-OCR: an image padded to a square and, if it is large, the grid of tiles nearest to its shape."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import HALF, IMAGE_ARGUMENTS, Pixels, PixelScaling, Size, count_of, tiled
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.multimodal.processors.tiling import nearest_grid
from quire.text.tokenizer import Tokenizer

_GREY = 127
"""Colour of the padding."""
_MOST_TILES = 6


class DeepseekOCRProcessor(ImageProcessor):
    """Processor of DeepSeek-OCR. The tiles come first, then the whole image, all of them image tokens."""

    arguments = (*IMAGE_ARGUMENTS, "crop_to_patches", "min_patches", "max_patches")
    mean = std = HALF
    default_tile: ClassVar[int] = 640
    facts: Any

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        side: int = facts.tower.sam.image
        size = {"height": side, "width": side}
        image_id = token_of(tokenizer, "<image>")
        super().__init__(path, facts, tokenizer, image_id=image_id, tile_size=self.default_tile, size=size)
        stored = self.settings.get("size")
        self.side: int = max(stored.values()) if isinstance(stored, dict) else side
        self.tile = self.settings.size("tile_size")

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        side, grid = self.whole_side(keys), (0, 0)
        views = {"pixels": self._padded(image, side, keys)}
        if keys.flag("crop_to_patches", True) and max(image.size) > self.tile:
            least, most = keys.size("min_patches", 2), count_of(keys, "max_patches", _MOST_TILES)
            rows, columns = grid = nearest_grid(image.size[::-1], self.tile, least, most)
            large = self.resize(image, (rows * self.tile, columns * self.tile), keys)
            tiles = tiled(large, (self.tile, self.tile))
            views["tiles"] = tiles.reshape(rows, columns, *tiles.shape[1:])
        return ProcessedItem([self.image_id] * self.count(grid, side), arrays=scaling(**views))

    def whole_side(self, keys: ConfigReader) -> int:
        """Return the side of the square to which the whole image is padded."""
        return self.side

    def _padded(self, image: Image.Image, side: int, keys: ConfigReader) -> Pixels:
        """Return the whole image, resized and padded to a square with the image in the center."""
        scale = side / max(image.size)
        width, height = (round(length * scale) for length in image.size)
        out = np.full((side, side, 3), _GREY, np.uint8)
        top, left = (side - height) // 2, (side - width) // 2
        out[top : top + height, left : left + width] = self.resize(image, (height, width), keys)
        return out

    def count(self, grid: Size, side: int) -> int:
        """Return the number of embeddings of an image with this grid of tiles (rows, columns). `side` is that
        of the whole image."""
        whole: int = self.facts.side(side)
        tile: int = self.facts.side(self.tile)
        return grid[0] * tile * (grid[1] * tile + 1) * (grid[0] > 0) + whole * (whole + 1) + 1

    def max_vectors(self, modality: str) -> int:
        most = count_of(self.settings, "max_patches", _MOST_TILES)
        grid = (most, 1) if self.settings.flag("crop_to_patches", True) else (0, 0)
        return int(self.count(grid, self.whole_side(self.settings)))

    def largest(self, modality: str) -> tuple[int, ...]:
        """Return the width and height of an image with all tiles in one column."""
        return self.tile, self.tile * count_of(self.settings, "max_patches", _MOST_TILES)


class DeepseekOCR2Processor(DeepseekOCRProcessor):
    """Processor of the second version of DeepSeek-OCR. A tile and a whole image have a fixed number of
    embeddings; an image that may not be cut is padded to the size of a tile."""

    default_tile = 768

    def whole_side(self, keys: ConfigReader) -> int:
        return self.side if keys.flag("crop_to_patches", True) else self.tile

    def count(self, grid: Size, side: int) -> int:
        tile, whole = self.facts.queries.values()
        return int(grid[0] * grid[1] * tile + (tile if side == self.tile else whole) + 1)
