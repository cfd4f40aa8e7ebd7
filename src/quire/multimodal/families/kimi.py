"""Kimi-VL and Kimi-K2.5: an image in its own size, with black at its edges until its squares are whole."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.config.facts import MediaFacts
from quire.config.keys import Keys
from quire.config.media.kimi import MoonFacts
from quire.errors import ConfigError
from quire.multimodal.families import Content, Processed
from quire.multimodal.families.pictures import Pictures
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    Finish,
    Pixels,
    Size,
    asked,
    center_cropped,
    resample_of,
    resized,
    stored_settings,
    wrong_argument,
)
from quire.text.tokenizer import Tokenizer

_SAME = {
    "in_token_limit": "max_patches",
    "in_patch_limit": "max_patches",
    "patch_limit_on_one_side": "max_side",
}
"""What its makers call settings that transformers calls otherwise."""
_KNOWN = (*_SAME, *_SAME.values(), "pad_input", *(set(IMAGE_ARGUMENTS) - {"size"}))
_MOST_PATCHES = 2**16
"""That a request may ask for."""


class KimiVLProcessor(Pictures):
    """As large as it is, unless that is too large."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: MoonFacts = facts.tower
        super().__init__(self.facts.image_id, self.facts.image_id, self.facts.size_out, tokenizer)
        stored = stored_settings(path)
        inner = stored.get("media_proc_cfg")
        stored = stored.but(**inner) if isinstance(inner, dict) else stored
        size = stored.get("size")
        side = size.get("max_height") if isinstance(size, dict) else None
        said = {_SAME[name]: stored.get(name) for name in _SAME if stored.get(name) is not None}
        self.settings = stored.but(
            **{"max_patches": stored.size("max_patches", 16384), "max_side": side} | said
        )
        begins = ("<|media_begin|>", "<|media_start|>")
        self.begin = next((each for each in begins if tokenizer.backend.token_to_id(each) is not None), "")

    def text(self, modality: str, number: int) -> str:
        place = super().text(modality, number)
        return f"{self.begin}image<|media_content|>{place}<|media_end|>" if self.begin else place

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> Processed:
        assert isinstance(content, Image.Image)
        try:
            keys = asked(self.settings, arguments, _KNOWN)
            keys = keys.but(**{_SAME[name]: value for name, value in arguments.items() if name in _SAME})
            finish = Finish.read(keys, HALF, HALF)
            pixels = self._sized(content, keys)
        except ConfigError as error:
            raise wrong_argument(error) from error
        side = self.facts.patch * self.facts.merge
        count = pixels.shape[0] // side * (pixels.shape[1] // side)
        return Processed([self.image_id] * count, arrays=finish(pixels))

    def _sized(self, image: Image.Image, keys: Keys) -> Pixels:
        """Whole squares of patches: with what is missing in black, or without what is too much."""
        size = image.size[::-1]
        if keys.flag("do_resize", True):
            size = self._fitting(size, keys)
        pixels = resized(image, size, resample_of(keys, Image.Resampling.BICUBIC))
        side = self.facts.patch * self.facts.merge
        if not keys.flag("pad_input", True):
            least = max(size[0] // side, 1) * side, max(size[1] // side, 1) * side
            return center_cropped(pixels, least)
        below, right = (-each % side for each in size)
        return np.pad(pixels, ((0, below), (0, right), (0, 0)))

    def _fitting(self, image: Size, keys: Keys) -> Size:
        """Smaller where there would be too many patches, of all or of a side."""
        for name in ("max_patches", "max_side"):
            if keys.size(name, 1) > _MOST_PATCHES:
                raise keys.wrong(name, f"{_MOST_PATCHES} at most")
        most, longest = keys.size("max_patches"), keys.size("max_side", 512) * self.facts.patch
        height, width = image
        patches = max(1, height // self.facts.patch) * max(1, width // self.facts.patch)
        scale = min(1.0, math.sqrt(most / patches), longest / height, longest / width)
        return min(max(1, int(height * scale)), longest), min(max(1, int(width * scale)), longest)

    def most_vectors(self, modality: str) -> int:
        width, height = self.largest(modality)
        return width * height // (self.facts.patch * self.facts.merge) ** 2

    def largest(self, modality: str) -> tuple[int, int]:
        side, most = self.facts.patch * self.facts.merge, self.settings.size("max_patches")
        longest = self.settings.size("max_side", 512)
        rows = min(math.isqrt(most), longest)
        columns = min(most // rows, longest)
        return -(-columns // self.facts.merge) * side, -(-rows // self.facts.merge) * side
