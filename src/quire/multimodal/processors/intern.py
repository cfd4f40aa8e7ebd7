"""InternVL: an image in the grid of tiles that is nearest to its shape, and the whole image."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.intern import InternFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError, RequestError
from quire.multimodal.images import (
    IMAGE_ARGUMENTS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    MOST_FRAMES,
    PixelScaling,
    Size,
    check_frames,
    count_of,
    override_settings,
    resample_of,
    resized,
    stored_settings,
    tiled,
    video_settings,
    wrong_argument,
)
from quire.multimodal.processors import Content, ProcessedItem, Video
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer

_BEGIN, _PLACE, _END, _VIDEO = "<img>", "<IMG_CONTEXT>", "</img>", "<video>"
_OLDER = {
    "min_dynamic_patch": "min_patches",
    "max_dynamic_patch": "max_patches",
    "dynamic_image_size": "crop_to_patches",
}
"""Argument names of the original code, with those of transformers."""
_KNOWN = (*IMAGE_ARGUMENTS, *_OLDER, *_OLDER.values())


class InternVLProcessor(ImageProcessor):
    """The mark is the image token; `<image>`, which the original code writes, is not a token."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: InternFacts = facts.tower
        self.modalities = facts.modalities
        self.begin, image_id, self.end = (token_of(tokenizer, token) for token in (_BEGIN, _PLACE, _END))
        super().__init__(image_id, image_id, self.facts.size_out, tokenizer)
        self.video = token_of(tokenizer, _VIDEO) if "video" in facts.modalities else self.mark
        stored = stored_settings(path)
        most = stored.size("max_patches", self.facts.most_tiles)
        self.settings = stored.but(crop_to_patches=self.facts.is_tiled, max_patches=most)
        self.video_settings = video_settings(path, self.settings)

    def marks(self, modality: str) -> list[int]:
        return [self.video if modality == "video" else self.mark]

    def text(self, modality: str, number: int) -> str:
        return _VIDEO if modality == "video" else _PLACE

    def spelled(self, text: str) -> str:
        is_token = self.tokenizer.backend.token_to_id("<image>") is not None
        return text if is_token else text.replace("<image>", _PLACE)

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        keys = override_settings(
            self.video_settings if modality == "video" else self.settings, arguments, _KNOWN
        )
        keys = keys.but(**{_OLDER[name]: value for name, value in arguments.items() if name in _OLDER})
        try:
            finish = PixelScaling.read(keys, IMAGENET_MEAN, IMAGENET_STD)
            if isinstance(content, Video):
                return self._process_video(content, finish, keys)
            assert isinstance(content, Image.Image)
            tiles = tiles_of(content, keys, self.facts.vit.image)
        except ConfigError as error:
            raise wrong_argument(error) from error
        return self.build_item(self._span(len(tiles)), arrays=finish(tiles))

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        check_frames(len(video.frames))
        return len(video.frames) * self.facts.tokens

    def _process_video(self, video: Video, finish: PixelScaling, keys: ConfigReader) -> ProcessedItem:
        side, resample = self.facts.vit.image, resample_of(keys, Image.Resampling.BICUBIC)
        check_frames(len(video.frames))
        frames = np.stack([resized(Image.fromarray(f), (side, side), resample) for f in video.frames])
        text = "\n".join(f"Frame{i + 1}: {_BEGIN}{_PLACE}{_END}" for i in range(len(frames)))
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        span = [i for i in token_ids for _ in range(self.facts.tokens if i == self.image_id else 1)]
        return self.build_item(span, arrays=finish(frames))

    def _span(self, num_tiles: int) -> list[int]:
        return [self.begin, *[self.image_id] * (self.facts.tokens * num_tiles), self.end]

    def embeds_span(self, num_vectors: int) -> list[int]:
        if num_vectors % self.facts.tokens:
            many = f"a multiple of {self.facts.tokens}"
            raise RequestError(f"image_embeds: {num_vectors} vectors, expected {many}", "multi_modal_data")
        return self._span(num_vectors // self.facts.tokens)

    def most_vectors(self, modality: str) -> int:
        if modality == "video":
            return MOST_FRAMES * self.facts.tokens
        most = self.settings.size("max_patches", 12) if self.settings.flag("crop_to_patches") else 1
        return self.facts.tokens * (most + (most > 1))

    def largest(self, modality: str) -> tuple[int, ...]:
        side, count = self.facts.vit.image, self.most_vectors(modality) // self.facts.tokens
        if modality == "video":
            return MOST_FRAMES, side, side
        return side * max(1, count - 1), side


@lru_cache
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return all grids of columns and rows, ordered by their number of tiles."""
    sides = range(1, most + 1)
    every = [(wide, high) for wide in sides for high in sides if least <= wide * high <= most]
    return sorted(every, key=lambda grid: grid[0] * grid[1])


def grid_of(image: Size, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tiles nearest to an image's aspect ratio; among equals the larger grid,
    if the image fills half of it."""
    height, width = image
    nearest, best = float("inf"), (1, 1)
    for columns, rows in _grids(least, most):
        away = abs(width / height - columns / rows)
        if away < nearest or (away == nearest and width * height > 0.5 * side * side * columns * rows):
            nearest, best = away, (rows, columns)
    return best


def tiles_of(
    image: Image.Image,
    keys: ConfigReader,
    side: int,
    grid: Callable[[Size, int, int, int], tuple[int, int]] = grid_of,
) -> NDArray[np.uint8]:
    """Return the tiles row by row, [tiles, side, side, 3]; the whole image follows if there are several."""
    resample, most = resample_of(keys, Image.Resampling.BICUBIC), count_of(keys, "max_patches", 12)
    rows, columns = 1, 1
    if keys.flag("crop_to_patches") and most > 1:
        rows, columns = grid(image.size[::-1], side, keys.size("min_patches", 1), most)
    tiles = tiled(resized(image, (rows * side, columns * side), resample), (side, side))
    if len(tiles) > 1:
        whole = resized(image, (side, side), resample)
        tiles = np.concatenate((tiles, whole[None]))
    return tiles
