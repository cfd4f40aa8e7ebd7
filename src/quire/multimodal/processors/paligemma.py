"""PaliGemma: images before the text, each as one square."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.paligemma import PaliGemmaFacts
from quire.errors import ConfigError
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    PixelScaling,
    fitted,
    override_settings,
    resample_of,
    resized,
    size_of,
    stored_settings,
    wrong_argument,
)
from quire.multimodal.processors import Content, ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer

_BEGIN = "<bos>"
"""First token of the text, after the last image."""


class PaliGemmaProcessor(ImageProcessor):
    """Puts the mark of one image before a text that has none."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: PaliGemmaFacts = facts.tower
        super().__init__(self.facts.image_id, self.facts.image_id, self.facts.size_out, tokenizer)
        token_of(tokenizer, _BEGIN)
        side = self.facts.vit.image
        self.settings = stored_settings(path, size={"height": side, "width": side})

    def spelled(self, text: str) -> str:
        mark = self.text("image", 1)
        text = text if mark in text else mark + text
        end = text.rfind(mark) + len(mark)
        begins = "" if text.startswith(_BEGIN, end) else _BEGIN
        return text[:end] + begins + text[end:] + "\n"

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Image.Image)
        keys = override_settings(self.settings, arguments, IMAGE_ARGUMENTS)
        try:
            finish = PixelScaling.read(keys, HALF, HALF)
            side, resample = self.facts.vit.image, resample_of(keys, Image.Resampling.BICUBIC)
            if fitted(size_of(keys), (side, side)) != (side, side):
                raise keys.wrong("size", f"{side} x {side} pixels")
            pixels = resized(content, (side, side), resample)
        except ConfigError as error:
            raise wrong_argument(error) from error
        return ProcessedItem([self.image_id] * self.facts.tokens, arrays=finish(pixels[None]))

    def most_vectors(self, modality: str) -> int:
        return self.facts.tokens

    def largest(self, modality: str) -> tuple[int, ...]:
        return self.facts.vit.image, self.facts.vit.image
