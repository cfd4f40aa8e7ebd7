"""PaliGemma: images before the text, each as one square."""

from pathlib import Path

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import TowerFacts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import HALF, PixelScaling
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer

_BEGIN = "<bos>"
"""First token of the text, after the last image."""


class PaliGemmaProcessor(ImageProcessor):
    """Processor of PaliGemma. It puts the placeholder of one image before a text without a placeholder."""

    mean = std = HALF
    facts: TowerFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        side = facts.tower.vit.image
        super().__init__(path, facts, tokenizer, size={"height": side, "width": side})
        token_of(tokenizer, _BEGIN)

    def rewrite_text(self, text: str) -> str:
        mark = self.text("image", 1)
        text = text if mark in text else mark + text
        end = text.rfind(mark) + len(mark)
        begins = "" if text.startswith(_BEGIN, end) else _BEGIN
        return text[:end] + begins + text[end:] + "\n"

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        self.check_square(keys)
        pixels = self.resize_to_square(image, keys)
        return ProcessedItem([self.image_id] * self.facts.tokens, arrays=scaling(pixels[None]))
