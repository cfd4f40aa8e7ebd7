"""LLaVA-1.5: the center of an image as one square of patches."""

from pathlib import Path
from typing import Any

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.llava import LlavaFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    PixelScaling,
    center_cropped,
    fitted,
    pad_to_square,
    size_of,
)
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer


class LlavaProcessor(ImageProcessor):
    """Processor of LLaVA-1.5, which resizes, crops and normalizes an image. The image must then have the size
    that the vision encoder reads."""

    arguments = (*IMAGE_ARGUMENTS, "do_center_crop", "crop_size", "do_pad")
    facts: LlavaFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        side, is_clip = facts.tower.vit.image, facts.tower.vit.has_class
        exact = {"height": side, "width": side}
        defaults: dict[str, Any] = {"size": exact}
        if is_clip:
            defaults = {"size": {"shortest_edge": side}, "do_center_crop": True}
        super().__init__(path, facts, tokenizer, crop_size=exact, **defaults)
        if not is_clip:
            self.mean = self.std = HALF
        scaling = PixelScaling.read(self.settings, self.mean, self.std)
        self.process_image(Image.new("RGB", (2, 2)), self.settings, scaling)

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        if keys.flag("do_pad") and keys.get("image_processor_type") != "CLIPImageProcessor":
            image = pad_to_square(image, scaling.mean or (0, 0, 0))
        size = image.size[1], image.size[0]
        size = fitted(size_of(keys), size) if keys.flag("do_resize", True) else size
        pixels = self.resize(image, size, keys)
        if keys.flag("do_center_crop"):
            crop = size_of(keys, "crop_size")
            pixels = center_cropped(pixels, (crop.get("height", 0), crop.get("width", 0)))
        side = self.facts.vit.image
        if pixels.shape[:2] != (side, side):
            raise ConfigError(
                f"{keys.source}: an image of {size[1]} x {size[0]} pixels is resized to "
                f"{pixels.shape[1]} x {pixels.shape[0]}, but the vision encoder needs {side} x {side}"
            )
        return ProcessedItem([self.image_id] * self.facts.tokens, arrays=scaling(pixels[None]))
