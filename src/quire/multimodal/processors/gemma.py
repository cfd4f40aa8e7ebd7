"""Gemma 3: an image as one square, with optional crops of a long one (pan and scan)."""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.gemma import GemmaFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError, RequestError
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    PixelScaling,
    count_of,
    fitted,
    override_settings,
    resample_of,
    resized,
    size_of,
    stored_settings,
    wrong_argument,
)
from quire.multimodal.processors import Content, ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer

_KNOWN = (
    *IMAGE_ARGUMENTS,
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
_MOST_NEWLINES = 64


class Newlines(ImageProcessor):
    """Spans with newlines around them, which merge with the newlines of the text into one token."""

    @cached_property
    def _newlines(self) -> dict[int, int]:
        """Return the token of each number of newlines."""
        ids = {count: self.tokenizer.backend.token_to_id("\n" * count) for count in range(1, _MOST_NEWLINES)}
        return {count: i for count, i in ids.items() if i is not None}

    @cached_property
    def _counts(self) -> dict[int, int]:
        return {i: count for count, i in self._newlines.items()}

    def joined(self, before: int, after: int) -> int | None:
        if before not in self._counts or after not in self._counts:
            return None
        return self._newlines.get(self._counts[before] + self._counts[after])


class Gemma3Processor(Newlines):
    """The mark is the begin-of-image token; the span has newlines around it, which merge with the text's."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: GemmaFacts = facts.tower
        super().__init__(self.facts.begin_id, self.facts.image_id, self.facts.size_out, tokenizer)
        side = self.facts.vit.image
        self.settings = stored_settings(path, size={"height": side, "width": side})

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Image.Image)
        keys = override_settings(self.settings, arguments, _KNOWN)
        try:
            images = [content, *crops(content, keys)]
            finish = PixelScaling.read(keys, HALF, HALF)
            side, resample = self.facts.vit.image, resample_of(keys, Image.Resampling.BILINEAR)
            if fitted(size_of(keys), (side, side)) != (side, side):
                raise keys.wrong("size", f"{side} x {side} pixels")
            squares = [resized(image, (side, side), resample) for image in images]
        except ConfigError as error:
            raise wrong_argument(error) from error
        return self.build_item(self._span(len(images) - 1), arrays=finish(np.stack(squares)))

    def _span(self, num_crops: int) -> list[int]:
        name = self.tokenizer.backend.id_to_token
        one = f"\n\n{name(self.mark)}{name(self.image_id)}{name(self.facts.end_id)}\n\n"
        text = one
        if num_crops:
            text = f"Here is the original image {one} and here are some crops to help you see better "
            text += " ".join([one] * num_crops)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [i for i in token_ids for _ in range(self.facts.tokens if i == self.image_id else 1)]

    def embeds_span(self, num_vectors: int) -> list[int]:
        per_image = self.facts.tokens
        if num_vectors % per_image:
            raise RequestError(
                f"image_embeds: {num_vectors} vectors, expected {per_image}", "multi_modal_data"
            )
        return self._span(num_vectors // per_image - 1)

    def most_vectors(self, modality: str) -> int:
        keys = self.settings
        most = keys.size("pan_and_scan_max_num_crops", 4) if keys.flag("do_pan_and_scan") else 0
        return self.facts.tokens * (1 + most)

    def largest(self, modality: str) -> tuple[int, ...]:
        long = self.most_vectors(modality) // self.facts.tokens
        least = self.settings.size("pan_and_scan_min_crop_size", 256)
        return (least * (long - 1), least) if long > 1 else (self.facts.vit.image, self.facts.vit.image)


def crops(image: Image.Image, keys: ConfigReader) -> list[Image.Image]:
    """Return the pan-and-scan crops: about as many squares as fit along a long image."""
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
