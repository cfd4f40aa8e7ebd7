"""Gemma 3: an image as one square, with optional crops of a long one (pan and scan)."""

import math
from pathlib import Path

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.gemma import GemmaFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import RequestError
from quire.multimodal.images import HALF, IMAGE_ARGUMENTS, PixelScaling, count_of
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer

_MAX_NEWLINES = 64


class NewlineTokens:
    """Newline tokens of a tokenizer. Those at the edges of an image span merge with adjacent newlines of the
    text into one token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = {count: tokenizer.backend.token_to_id("\n" * count) for count in range(1, _MAX_NEWLINES)}
        self._ids = {count: i for count, i in ids.items() if i is not None}
        self._counts = {i: count for count, i in self._ids.items()}

    def joined(self, before: int, after: int) -> int | None:
        """Return the token that two adjacent newline tokens merge into; None if one of them is no newline
        token or there is no such token."""
        if before not in self._counts or after not in self._counts:
            return None
        return self._ids.get(self._counts[before] + self._counts[after])


class Gemma3Processor(ImageProcessor):
    """Processor of Gemma 3 images. The placeholder in prompts is the begin-of-image token; newlines around
    the span merge with those of the text."""

    arguments = (
        *IMAGE_ARGUMENTS,
        "do_pan_and_scan",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    )
    mean = std = HALF
    resample = Image.Resampling.BILINEAR
    facts: GemmaFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        side = facts.tower.vit.image
        size = {"height": side, "width": side}
        super().__init__(path, facts, tokenizer, mark=facts.tower.begin_id, size=size)
        self.joined = NewlineTokens(tokenizer).joined

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        images = [image, *crops(image, keys)]
        self.check_square(keys)
        squares = [self.resize_to_square(image, keys) for image in images]
        return self.build_item(self._span(len(images) - 1), arrays=scaling(np.stack(squares)))

    def _span(self, num_crops: int) -> list[int]:
        name = self.tokenizer.backend.id_to_token
        one = f"\n\n{name(self.mark)}{name(self.image_id)}{name(self.facts.end_id)}\n\n"
        text = one
        if num_crops:
            text = f"Here is the original image {one} and here are some crops to help you see better "
            text += " ".join([one] * num_crops)
        return self.expand(text)

    def embeds_span(self, num_vectors: int) -> list[int]:
        per_image = self.facts.tokens
        if num_vectors % per_image:
            raise RequestError(
                f"image_embeds: {num_vectors} vectors, expected {per_image}", "multi_modal_data"
            )
        return self._span(num_vectors // per_image - 1)

    def max_vectors(self, modality: str) -> int:
        keys = self.settings
        most = keys.size("pan_and_scan_max_num_crops", 4) if keys.flag("do_pan_and_scan") else 0
        return self.facts.tokens * (1 + most)

    def largest(self, modality: str) -> tuple[int, ...]:
        long = self.max_vectors(modality) // self.facts.tokens
        least = self.settings.size("pan_and_scan_min_crop_size", 256)
        return (least * (long - 1), least) if long > 1 else (self.facts.vit.image, self.facts.vit.image)


def crops(image: Image.Image, keys: ConfigReader) -> list[Image.Image]:
    """Return the pan-and-scan crops: pieces along the longer side of an image, about square; [] if there are
    none."""
    if not keys.flag("do_pan_and_scan"):
        return []
    least = keys.size("pan_and_scan_min_crop_size", 256)
    most = count_of(keys, "pan_and_scan_max_num_crops", 4)
    short, long = sorted(image.size)
    if long / short < keys.number("pan_and_scan_min_ratio_to_activate", 1.2):
        return []
    count = min(most, max(2, min(long // least, math.floor(long / short + 0.5))))
    step = math.ceil(long / count)
    if min(step, short) < least:
        return []
    width, height = image.size
    if width >= height:
        return [image.crop((at, 0, min(at + step, width), height)) for at in range(0, step * count, step)]
    return [image.crop((0, at, width, min(at + step, height))) for at in range(0, step * count, step)]
