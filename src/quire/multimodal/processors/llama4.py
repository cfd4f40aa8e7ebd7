"""Llama 4: an image in a canvas (a grid of tiles), and the whole image."""

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.llama4 import Llama4Facts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import HALF, IMAGE_ARGUMENTS, PixelScaling, Size, count_of, fit_size, tiled
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer

_MARK, _PLACE = "<|image|>", "<|patch|>"


class Llama4Processor(ImageProcessor):
    """Processor of Llama 4 images. The placeholder in prompts is `<|image|>`, which the span also contains,
    before the whole image."""

    arguments = (*IMAGE_ARGUMENTS, "max_patches", "resize_to_max_canvas")
    mean = std = HALF
    is_narrow = True
    resample = Image.Resampling.BILINEAR
    facts: Llama4Facts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer, mark=token_of(tokenizer, _MARK))

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        side, is_largest = self.facts.vit.image, keys.flag("resize_to_max_canvas")
        size = image.size[1], image.size[0]
        canvas = best_canvas(size, side, count_of(keys, "max_patches", 16), is_largest=is_largest)
        bounds = canvas
        if not is_largest:
            bounds = min(max(size[0], side), canvas[0]), min(max(size[1], side), canvas[1])
        inner = fit_size(size, bounds)
        pixels = np.zeros((*canvas, 3), np.uint8)
        pixels[: inner[0], : inner[1]] = self.resize(image, inner, keys)
        tiles = tiled(pixels, (side, side))
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, self.resize_to_square(image, keys)[None]))
        span = self._span(canvas[0] // side, canvas[1] // side)
        return self.build_item(span, arrays=scaling(tiles))

    def _span(self, rows: int, columns: int) -> list[int]:
        row = "<|tile_x_separator|>".join([_PLACE] * columns) + "<|tile_y_separator|>"
        tiles = row * rows if rows * columns > 1 else ""
        return self.expand(f"<|image_start|>{tiles}{_MARK}{_PLACE}<|image_end|>")

    def max_vectors(self, modality: str) -> int:
        most = self.settings.size("max_patches", 16)
        return self.facts.tokens * (most + (most > 1))

    def largest(self, modality: str) -> tuple[int, ...]:
        most = self.settings.size("max_patches", 16)
        rows = max(n for n in range(1, int(most**0.5) + 1) if most % n == 0)
        return most // rows * self.facts.vit.image, rows * self.facts.vit.image


@lru_cache
def canvases(side: int, most: int) -> NDArray[np.float32]:
    """Return the height and width in pixels of all canvases, [canvases, 2]: rectangles of at most `most`
    tiles. They are grouped by aspect ratio."""
    shapes: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in (n for n in range(1, count + 1) if count % n == 0):
            shapes.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return np.array([size for group in shapes.values() for size in group], np.float32) * side


def best_canvas(image: Size, side: int, most: int, *, is_largest: bool) -> Size:
    """Return the canvas (height and width of a grid of tiles) that enlarges an image least or, if
    `is_largest`, most. If no canvas is large enough, return the one that shrinks it least; among equals, the
    smallest."""
    sizes = canvases(side, most)
    scales = (sizes / np.array(image, np.float32)).min(1)
    enlarging = scales[scales >= 1]
    is_least = len(enlarging) and not is_largest
    fitting = sizes[scales == (enlarging.min() if is_least else scales.max())]
    height, width = fitting[fitting.prod(1).argmin()]
    return int(height), int(width)
