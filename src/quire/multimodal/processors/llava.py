"""LLaVA-1.5: the center of an image as one square of patches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.llava import LlavaFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError
from quire.multimodal.images import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    IMAGE_ARGUMENTS,
    Pixels,
    PixelScaling,
    center_cropped,
    fitted,
    override_settings,
    pad_to_square,
    resample_of,
    resized,
    size_of,
    stored_settings,
    wrong_argument,
)
from quire.multimodal.processors import Content, ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer

_KNOWN = (*IMAGE_ARGUMENTS, "do_center_crop", "crop_size", "do_pad")


class LlavaProcessor(ImageProcessor):
    """Resizes, crops and normalizes. The result must have the image size of the vision encoder."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: LlavaFacts = facts.tower
        super().__init__(self.facts.image_id, self.facts.image_id, self.facts.size_out, tokenizer)
        side = self.facts.vit.image
        exact = {"height": side, "width": side}
        if self.facts.vit.has_class:
            defaults: dict[str, Any] = {"size": {"shortest_edge": side}, "do_center_crop": True}
            self.norm = CLIP_MEAN, CLIP_STD
        else:
            defaults = {"size": exact}
            self.norm = HALF, HALF
        self.settings = stored_settings(path, crop_size=exact, **defaults)
        self._pixels(Image.new("RGB", (2, 2)), self.settings)

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Image.Image)
        try:
            pixels, finish = self._pixels(content, override_settings(self.settings, arguments, _KNOWN))
        except ConfigError as error:
            raise wrong_argument(error) from error
        token_ids = [self.image_id] * self.facts.tokens
        return ProcessedItem(token_ids, arrays=finish(pixels[None]))

    def _pixels(self, image: Image.Image, keys: ConfigReader) -> tuple[Pixels, PixelScaling]:
        finish = PixelScaling.read(keys, *self.norm)
        if keys.flag("do_pad") and keys.get("image_processor_type") != "CLIPImageProcessor":
            image = pad_to_square(image, finish.mean or (0, 0, 0))
        size = image.size[1], image.size[0]
        size = fitted(size_of(keys), size) if keys.flag("do_resize", True) else size
        pixels = resized(image, size, resample_of(keys, Image.Resampling.BICUBIC))
        if keys.flag("do_center_crop"):
            crop = size_of(keys, "crop_size")
            pixels = center_cropped(pixels, (crop.get("height", 0), crop.get("width", 0)))
        side = self.facts.vit.image
        if pixels.shape[:2] != (side, side):
            raise ConfigError(
                f"{keys.source}: an image of {size[1]} x {size[0]} pixels is resized to "
                f"{pixels.shape[1]} x {pixels.shape[0]}, but the vision encoder needs {side} x {side}"
            )
        return pixels, finish

    def most_vectors(self, modality: str) -> int:
        return self.facts.tokens

    def largest(self, modality: str) -> tuple[int, ...]:
        return self.facts.vit.image, self.facts.vit.image
