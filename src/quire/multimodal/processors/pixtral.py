"""Pixtral, Mistral 3 and LightOnOCR: an image in its own aspect ratio, row by row."""

from pathlib import Path

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.pixtral import PixtralFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import RequestError
from quire.multimodal.images import PixelScaling, Size, processor_settings, size_of
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer


class PixtralProcessor(ImageProcessor):
    """Processor of Pixtral, Mistral 3 and LightOnOCR. It resizes an image if it is too large; break tokens
    end its rows, and an end token ends the image."""

    facts: PixtralFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer, size={"longest_edge": facts.tower.image})
        stored = processor_settings(path)
        if self.facts.breaks:
            self.break_id = token_of(tokenizer, stored.get("image_break_token") or "[IMG_BREAK]")
            self.end_id = token_of(tokenizer, stored.get("image_end_token") or "[IMG_END]")
        self.side: int = self.facts.patch * self.facts.merge
        self.unit = self.side if self.facts.breaks else self._unit()
        """Number of pixels of which the height and width of a resized image are multiples."""

    def _unit(self) -> int:
        """Return `patch_size` of the settings: the side in pixels of a patch, or of a square of merged
        patches."""
        patch_size = self.settings.get("patch_size")
        if isinstance(patch_size, dict):
            patch_size = patch_size.get("height")
        return ConfigReader(self.settings.source, {"patch_size": patch_size}).size("patch_size", 16)

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        size = self._size(keys, image.size[::-1])
        pixels = self.resize(image, size, keys)
        rows, columns = size[0] // self.side, size[1] // self.side
        if not rows or not columns:
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels is resized to {size[1]} x "
                f"{size[0]}, and {self.side} x {self.side} are the minimum"
            )
        if not self.facts.breaks:
            return self.build_item([self.image_id] * (rows * columns), arrays=scaling(pixels))
        row = [*[self.image_id] * columns, self.break_id]
        token_ids = [*(row * rows)[:-1], self.end_id]
        return self.build_item(token_ids, arrays=scaling(pixels))

    def _size(self, keys: ConfigReader, image: Size) -> Size:
        """Return the (height, width) in pixels of an image, reduced to the maximum, then rounded up to whole
        patches."""
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

    def max_vectors(self, modality: str) -> int:
        width, height = self.largest(modality)
        return height // self.side * (width // self.side)

    def largest(self, modality: str) -> tuple[int, int]:
        most = size_of(self.settings)
        longest = most.get("longest_edge") or max(most.values())
        height, width = self._size(self.settings, (longest, longest))
        return width, height
