"""Step3 to Step-3.7: an image as a square, after square crops (windows) of a large or long image."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.step3 import Step3Facts, StepFacts
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array
from quire.errors import RequestError
from quire.multimodal.images import PixelScaling, Size, resized
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer

_TOKENS = ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
_NARROW, _LONG, _LONGER, _MORE = 32, 1.5, 4, 0.2
"""Limits for windows: the side in pixels below which a long image is padded to a square; the aspect ratio
from which on a small image has windows; the ratio from which on windows are as high as the image; the
fraction of a window from which on a part of an image counts as a whole window."""


class WindowPlan(NamedTuple):
    """Sizes of an image and of its windows, the square crops that are encoded in addition."""

    size: Size
    """Size of the whole image."""
    side: int
    """Side of a window in pixels; 0 if there are no windows."""
    large: Size
    """Size to which the image is resized before it is cut into windows."""

    @property
    def grid(self) -> Size:
        if not self.side:
            return 0, 0
        return max(1, self.large[0] // self.side), max(1, self.large[1] // self.side)


class StepVLProcessor(ImageProcessor):
    """Processor of Step3 to Step-3.7: a whole image and its windows. The placeholder in prompts is the image
    token."""

    arguments = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "do_convert_rgb")
    facts: StepFacts | Step3Facts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer)
        self.image: int = self.facts.vit.image
        self.window = self.settings.size("patch_size", self.image * 9 // 13)
        self.longest = self.settings.size("max_image_size", 3024)
        self.start, self.stop, self.newline, self.begin, self.end = (token_of(tokenizer, t) for t in _TOKENS)

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        short, long = sorted(image.size)
        if short < _NARROW and long / short > _LONGER:
            image = _squared(image)
        plan = self.plan(image.size[::-1])
        small = resized(image, plan.size, Image.Resampling.BILINEAR)
        rows, columns = plan.grid
        arrays = {"pixels": Array.of(resize_floats(scaling.normalized(small), self.image))}
        if rows:
            large = Image.fromarray(resized(Image.fromarray(small), plan.large, Image.Resampling.BILINEAR))
            boxes = [
                (column * plan.side, row * plan.side) for row in range(rows) for column in range(columns)
            ]
            windows = [large.crop((x, y, x + plan.side, y + plan.side)) for x, y in boxes]
            pixels = [scaling.normalized(np.asarray(window)) for window in windows]
            arrays["windows"] = Array.of(np.stack([resize_floats(part, self.window) for part in pixels]))
        return self.build_item(self._span(rows, columns), arrays=arrays)

    def plan(self, image: Size) -> WindowPlan:
        height, width = image
        if max(image) > self.longest:
            scale = self.longest / max(image)
            height, width = max(1, int(height * scale)), max(1, int(width * scale))
        short, long = sorted((height, width))
        if long <= self.image:
            side = short if long / short > _LONG else 0
        else:
            side = min(short, self.window) if long / short > _LONGER else self.window
        large = (_whole(height, side), _whole(width, side)) if side else (height, width)
        plan = WindowPlan((height, width), side, large)
        if plan.grid[0] * plan.grid[1] > self._max_windows():
            raise RequestError(
                f"an image of {image[1]} x {image[0]} pixels is too narrow: it would need "
                f"{plan.grid[0] * plan.grid[1]} windows, and {self._max_windows()} are the maximum"
            )
        return plan

    def _max_windows(self) -> int:
        return max((self.longest // self.window + 1) ** 2, self.longest // _NARROW + 1)

    def _span(self, rows: int, columns: int) -> list[int]:
        per_window, whole = self.facts.tokens(self.window), self.facts.tokens(self.image)
        row = [self.start, *[self.image_id] * per_window, self.stop] * columns + [self.newline]
        return [*(row * rows)[:-1], self.begin, *[self.image_id] * whole, self.end]

    def embeds_span(self, num_vectors: int) -> list[int]:
        return [self.begin, *[self.image_id] * num_vectors, self.end]

    def max_vectors(self, modality: str) -> int:
        return self._max_windows() * self.facts.tokens(self.window) + self.facts.tokens(self.image)

    def largest(self, modality: str) -> tuple[int, int]:
        is_long = self.longest // _NARROW + 1 > (self.longest // self.window + 1) ** 2
        return self.longest, _NARROW if is_long else self.longest


def _whole(length: int, side: int) -> int:
    """Round a length in pixels to a multiple of `side`, the side of a window; a shorter length is
    unchanged."""
    count, rest = divmod(length, side)
    return side * (count + (rest / side > _MORE)) if count else length


def _squared(image: Image.Image) -> Image.Image:
    """Return the image padded with black to a square, with the image at the upper left."""
    out = Image.new("RGB", (max(image.size),) * 2)
    out.paste(image, (0, 0))
    return out


def resize_floats(numbers: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Resize an image [3, height, width] of floats to [3, side, side], without rounding to bytes."""
    parts = [Image.fromarray(channel).resize((side, side), Image.Resampling.BILINEAR) for channel in numbers]
    return np.stack([np.asarray(part) for part in parts])
