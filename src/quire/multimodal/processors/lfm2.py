"""LFM2-VL: an image in its own shape or, if it is large, in tiles with a thumbnail after them."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.lfm2 import Lfm2VLFacts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import HALF, IMAGE_ARGUMENTS, PixelScaling, Size, count_of, tiled
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.multimodal.processors.tiling import nearest_grid
from quire.text.tokenizer import Tokenizer

_MAX_TOKENS = 4096
"""Maximum number of tokens of a whole image that settings may have."""


class Lfm2VLProcessor(ImageProcessor):
    """Processor of LFM2-VL. It resizes an image to whole squares of patches, each of which becomes one token;
    a large image is also cut into tiles."""

    arguments = (
        *IMAGE_ARGUMENTS,
        "do_image_splitting",
        "min_tiles",
        "max_tiles",
        "use_thumbnail",
        "min_image_tokens",
        "max_image_tokens",
        "max_pixels_tolerance",
    )
    mean = std = HALF
    resample = Image.Resampling.BILINEAR
    facts: Lfm2VLFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer)
        self.unit = self.facts.vit.patch * self.facts.merge
        self.tile = self.settings.size("tile_size", 512)
        known = {"encoder_patch_size": self.facts.vit.patch, "downsample_factor": self.facts.merge}
        for key, size in known.items():
            if self.settings.get(key) not in (None, size):
                raise self.settings.wrong(key, f"{size}, as in config.json")
        if self.tile % self.unit:
            raise self.settings.wrong("tile_size", f"a multiple of {self.unit}")
        self.start, self.end = (token_of(tokenizer, f"<|image_{name}|>") for name in ("start", "end"))
        self.max_vectors("image")

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        size = self._whole_size(image.size[::-1], keys)
        grid = self._grid(image.size[::-1], keys)
        arrays: dict[str, NDArray[np.uint8]] = {}
        if grid != (1, 1):
            large = self.resize(image, (grid[0] * self.tile, grid[1] * self.tile), keys)
            arrays["tiles"] = tiled(large, (self.tile, self.tile))
        if grid == (1, 1) or keys.flag("use_thumbnail", True):
            arrays["pixels"] = self.resize(image, size, keys)
        num_whole = size[0] * size[1] // self.unit**2 if "pixels" in arrays else 0
        return self.build_item(self._span(grid, num_whole), arrays=scaling(**arrays))

    def _span(self, grid: Size, num_whole: int) -> list[int]:
        per_tile, has_tiles = (self.tile // self.unit) ** 2, grid != (1, 1)
        span = [self.start]
        for row in range(grid[0] if has_tiles else 0):
            for column in range(grid[1]):
                mark = token_of(self.tokenizer, f"<|img_row_{row + 1}_col_{column + 1}|>")
                span += [mark, *[self.image_id] * per_tile]
        if has_tiles and num_whole:
            span.append(token_of(self.tokenizer, "<|img_thumbnail|>"))
        return [*span, *[self.image_id] * num_whole, self.end]

    def _token_limits(self, keys: ConfigReader) -> tuple[int, int]:
        """Return the minimum and the maximum number of tokens of the whole image (not its tiles)."""
        least, most = keys.size("min_image_tokens", 64), keys.size("max_image_tokens", 256)
        if not least <= most <= _MAX_TOKENS:
            raise keys.wrong("max_image_tokens", f"from min_image_tokens ({least}) to {_MAX_TOKENS}")
        return least, most

    def _whole_size(self, image: Size, keys: ConfigReader) -> Size:
        """Return the (height, width) in pixels to resize the whole image to: whole squares of patches, within
        the limits of tokens."""
        unit, area = self.unit, image[0] * image[1]
        least, most = (count * unit**2 for count in self._token_limits(keys))
        height, width = (max(unit, round(side / unit) * unit) for side in image)
        if height * width > most:
            scale = math.sqrt(area / most)
            height, width = (max(unit, math.floor(side / scale / unit) * unit) for side in image)
        elif height * width < least:
            scale = math.sqrt(least / area)
            height, width = (math.ceil(side * scale / unit) * unit for side in image)
        return height, width

    def _grid(self, image: Size, keys: ConfigReader) -> Size:
        """Return the rows and columns of tiles; 1 and 1 if the image is not cut into tiles."""
        least, most = keys.size("min_tiles", 2), count_of(keys, "max_tiles", 10)
        if least > most:
            raise keys.wrong("min_tiles", f"at most max_tiles, {most}")
        tolerance = keys.number("max_pixels_tolerance", 2.0)
        height, width = (max(self.facts.vit.patch, round(side / self.unit) * self.unit) for side in image)
        is_large = height * width > self._token_limits(keys)[1] * self.unit**2 * tolerance
        if not is_large or most == 1 or not keys.flag("do_image_splitting", True):
            return 1, 1
        return nearest_grid(image, self.tile, least, most)

    def max_vectors(self, modality: str) -> int:
        keys = self.settings
        most = self._token_limits(keys)[1]
        if not keys.flag("do_image_splitting", True):
            return most
        tiles = count_of(keys, "max_tiles", 10) * (self.tile // self.unit) ** 2
        return max(most, tiles + most * keys.flag("use_thumbnail", True))

    def largest(self, modality: str) -> tuple[int, int]:
        side = self.unit * math.isqrt(self._token_limits(self.settings)[1])
        if not self.settings.flag("do_image_splitting", True):
            return side, side
        return self.tile * count_of(self.settings, "max_tiles", 10), self.tile
