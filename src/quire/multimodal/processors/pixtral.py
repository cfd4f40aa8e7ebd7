"""Pixtral, Mistral 3 and LightOnOCR: an image in its own aspect ratio, row by row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.pixtral import PixtralFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError, RequestError
from quire.multimodal.images import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGE_ARGUMENTS,
    PixelScaling,
    Size,
    override_settings,
    processor_settings,
    resample_of,
    resized,
    size_of,
    stored_settings,
    wrong_argument,
)
from quire.multimodal.processors import Content, ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer


class PixtralProcessor(ImageProcessor):
    """Keeps the size of an image unless it is too large; a break token follows each row, an end token the
    last."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: PixtralFacts = facts.tower
        super().__init__(self.facts.image_id, self.facts.image_id, self.facts.size_out, tokenizer)
        stored = processor_settings(path)
        if self.facts.breaks:
            self.break_id = token_of(tokenizer, stored.get("image_break_token") or "[IMG_BREAK]")
            self.end_id = token_of(tokenizer, stored.get("image_end_token") or "[IMG_END]")
        self.side: int = self.facts.patch * self.facts.merge
        self.settings = stored_settings(path, size={"longest_edge": self.facts.image})
        self.unit = self.side if self.facts.breaks else self._unit()
        """Number of pixels of which both sides are multiples."""

    def _unit(self) -> int:
        """Read the unit from the processor's file, which may be one patch instead of a merged square."""
        patch_size = self.settings.get("patch_size")
        if isinstance(patch_size, dict):
            patch_size = patch_size.get("height")
        return ConfigReader(self.settings.source, {"patch_size": patch_size}).size("patch_size", 16)

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Image.Image)
        try:
            keys = override_settings(self.settings, arguments, IMAGE_ARGUMENTS)
            finish = PixelScaling.read(keys, CLIP_MEAN, CLIP_STD)
            size = self._size(keys, content.size[::-1])
            pixels = resized(content, size, resample_of(keys, Image.Resampling.BICUBIC))
        except ConfigError as error:
            raise wrong_argument(error) from error
        rows, columns = size[0] // self.side, size[1] // self.side
        if not rows or not columns:
            raise RequestError(
                f"an image of {content.width} x {content.height} pixels is resized to {size[1]} x "
                f"{size[0]}, and {self.side} x {self.side} are the minimum"
            )
        if not self.facts.breaks:
            return self.build_item([self.image_id] * (rows * columns), arrays=finish(pixels))
        row = [*[self.image_id] * columns, self.break_id]
        token_ids = [*(row * rows)[:-1], self.end_id]
        return self.build_item(token_ids, arrays=finish(pixels))

    def _size(self, keys: ConfigReader, image: Size) -> Size:
        """Return the size of an image in whole patches, rounded up, reduced to the maximum."""
        most = size_of(keys)
        longest = most.get("longest_edge", 0)
        highest, widest = most.get("height", longest), most.get("width", longest)
        if not highest or not widest:
            raise keys.wrong("size", "longest_edge, or height and width")
        height, width = image
        too_large = max(height / highest, width / widest)
        if too_large > 1:
            height, width = int(height / too_large), int(width / too_large)
        return -(-height // self.unit) * self.unit, -(-width // self.unit) * self.unit

    def most_vectors(self, modality: str) -> int:
        width, height = self.largest(modality)
        return height // self.side * (width // self.side)

    def largest(self, modality: str) -> tuple[int, int]:
        most = size_of(self.settings)
        longest = most.get("longest_edge") or max(most.values())
        height, width = self._size(self.settings, (longest, longest))
        return width, height
