"""Gemma 4: an image in its own aspect ratio, with at most `max_soft_tokens` image tokens (soft tokens)."""

import math
from pathlib import Path

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.gemma4 import Gemma4VisionFacts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import HALF, IMAGE_ARGUMENTS, PixelScaling, Size
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer

_SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Numbers of soft tokens that the model was trained for."""


class Gemma4Processor(ImageProcessor):
    """Processor of Gemma 4 images. It resizes an image to whole squares of patches, each of which becomes one
    of at most `max_soft_tokens` image tokens."""

    arguments = (*IMAGE_ARGUMENTS, "max_soft_tokens")
    mean = std = HALF
    facts: Gemma4VisionFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer, do_normalize=False)
        known = {"patch_size": self.facts.patch, "pooling_kernel_size": self.facts.merge}
        for key, size in known.items():
            if self.settings.get(key) not in (None, size):
                raise self.settings.wrong(key, f"{size}, as in config.json")
        self.unit = self.facts.patch * self.facts.merge
        self._max_soft_tokens(self.settings)

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        height, width = self._size(image.size[::-1], self._max_soft_tokens(keys))
        pixels = self.resize(image, (height, width), keys)
        count = height * width // self.unit**2
        span = [self.facts.begin_id, *[self.image_id] * count, self.facts.end_id]
        return self.build_item(span, arrays=scaling(pixels))

    def _max_soft_tokens(self, keys: ConfigReader) -> int:
        most = keys.size("max_soft_tokens", 280)
        if most not in _SOFT_TOKENS:
            raise keys.wrong("max_soft_tokens", f"one of {', '.join(map(str, _SOFT_TOKENS))}")
        return most

    def _size(self, image: Size, most: int) -> Size:
        """Return the largest (height, width) in pixels with about the image's aspect ratio and at most `most`
        squares of patches."""
        unit, factor = self.unit, math.sqrt(most * self.unit**2 / (image[0] * image[1]))
        height, width = (int(factor * side / unit) * unit for side in image)
        if height == 0:
            return unit, min(image[1] // image[0], most) * unit
        if width == 0:
            return min(image[0] // image[1], most) * unit, unit
        return height, width

    def max_vectors(self, modality: str) -> int:
        return self._max_soft_tokens(self.settings)

    def largest(self, modality: str) -> tuple[int, int]:
        """Return the width and height in pixels of an image of one row of squares, which uses all soft
        tokens."""
        return self._max_soft_tokens(self.settings) * self.unit, self.unit
