"""dots.ocr: an image as a grid of patches, with positions like plain text."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.dots import DotsFacts
from quire.multimodal.images import resized
from quire.multimodal.processors import Content, ProcessedItem
from quire.multimodal.processors.grid import patches_of
from quire.multimodal.processors.grid_settings import read_settings
from quire.multimodal.processors.image_base import SpanProcessor
from quire.text.tokenizer import Tokenizer


class DotsProcessor(SpanProcessor):
    """Processor of dots.ocr, which cuts images into patches. The placeholder in prompts is the image
    token."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        tower: DotsFacts = facts.tower
        self.modalities = facts.modalities
        super().__init__(tower.image_id, tower.image_id, tower.size_out, tokenizer)
        self.settings = read_settings(path, facts)["image"]

    def text(self, modality: str, number: int) -> str:
        return f"<|img|>{super().text(modality, number)}<|endofimg|>"

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Image.Image)
        settings = self.settings.with_arguments(arguments)
        size = settings.size_of(content.height, content.width)
        pixels = patches_of(resized(content, size, settings.resample)[None], settings)
        count = math.prod(pixels.shape[:3]) // settings.merge**2
        return ProcessedItem([self.image_id] * count, arrays=settings.scaling.to_arrays(pixels=pixels))

    def max_vectors(self, modality: str) -> int:
        return self.settings.max_vectors()

    def largest(self, modality: str) -> tuple[int, int]:
        most = self.settings.max_vectors()
        rows = math.isqrt(most)
        return most // rows * self.settings.unit, rows * self.settings.unit
