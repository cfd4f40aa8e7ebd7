"""Idefics 3 and SmolVLM: an image in tiles, each after a token for its position, and the whole image."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ShuffledFacts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import HALF, IMAGE_ARGUMENTS, PixelScaling, Size, size_of, tiled
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LONGEST = 4096
"""Maximum side in pixels of a resized image, regardless of the settings."""


class Idefics3Processor(ImageProcessor):
    """Processor of Idefics 3 and SmolVLM. It resizes an image twice: to the `longest_edge` of the settings,
    then to whole tiles."""

    arguments = (*IMAGE_ARGUMENTS, "do_image_splitting", "max_image_size")
    mean = std = HALF
    resample = Image.Resampling.LANCZOS
    facts: ShuffledFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer, size={"longest_edge": 4 * facts.tower.vit.image})

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        tiles, grid = self._tiles(image, keys)
        return self.build_item(self._span(grid), arrays=scaling(tiles))

    def _tiles(self, image: Image.Image, keys: ConfigReader) -> tuple[NDArray[np.uint8], Size]:
        """Return the tiles with the whole image as the last one, and the rows and columns of tiles. These are
        0 and 0 if the whole image is the only tile."""
        side = self.facts.vit.image
        if keys.get("max_image_size") is not None and set(size_of(keys, "max_image_size").values()) != {side}:
            raise keys.wrong("max_image_size", f"{side}, the image size of the vision encoder")
        if max(image.size) > _LONGEST and not keys.flag("do_resize", True):
            raise keys.wrong("do_resize", f"true for images of more than {_LONGEST} pixels a side")
        if keys.flag("do_resize", True):
            image = Image.fromarray(self.resize(image, _longest_edge_size(keys, image.size[::-1]), keys))
        if not keys.flag("do_image_splitting", True):
            return self.resize_to_square(image, keys)[None], (0, 0)
        rows, columns = _grid(image.size[::-1], side)
        image = Image.fromarray(self.resize(image, (rows * side, columns * side), keys))
        if rows * columns == 1:
            return np.asarray(image)[None], (0, 0)
        whole = self.resize_to_square(image, keys)
        return np.concatenate((tiled(np.asarray(image), (side, side)), whole[None])), (rows, columns)

    def _span(self, grid: Size) -> list[int]:
        place = self.text("image", 1)
        rows = [
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{place}" for column in range(grid[1])) + "\n"
            for row in range(grid[0])
        ]
        return self.expand("".join(rows) + ("\n" if rows else "") + f"{_AROUND}{_WHOLE}{place}{_AROUND}")

    def max_vectors(self, modality: str) -> int:
        width, height = self.largest(modality)
        count = width * height // self.facts.vit.image**2
        return int(self.facts.tokens * (count + (count > 1)))

    def largest(self, modality: str) -> tuple[int, int]:
        side: int = self.facts.vit.image
        if not self.settings.flag("do_image_splitting", True):
            return side, side
        rows, columns = _grid(_longest_edge_size(self.settings, (side, side)), side)
        return columns * side, rows * side


def _longest_edge_size(keys: ConfigReader, image: Size) -> Size:
    """Return the height and width of an image resized to the setting `longest_edge` as its longer side. The
    other side is rounded up to an even number."""
    size = size_of(keys)
    if "longest_edge" not in size:
        return size.get("height", 1), size.get("width", 1)
    height, width = image
    ratio, longest = width / height, size["longest_edge"]
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / ratio)
    elif height > width and height > _LONGEST:
        height, width = _LONGEST, int(_LONGEST * ratio)
    return max(height, 1), max(width, 1)


def _grid(image: Size, side: int) -> Size:
    """Return the rows and columns of tiles with this side that cover the image."""
    height, width = image
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return math.ceil(int(columns * side / ratio) / side), columns
    rows = math.ceil(height / side)
    return rows, math.ceil(int(rows * side * ratio) / side)
