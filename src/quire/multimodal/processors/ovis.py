"""Ovis 2: a whole image and, if it is large enough, its tiles, with separator tokens between them."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.ovis import OvisFacts
from quire.data.multimodal import Array
from quire.errors import ConfigError, RequestError
from quire.multimodal.images import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGE_ARGUMENTS,
    PixelScaling,
    count_of,
    fitted,
    override_settings,
    resample_of,
    resized,
    size_of,
    stored_settings,
    tiled,
    wrong_argument,
)
from quire.multimodal.processors import Content, ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer

_KNOWN = (*IMAGE_ARGUMENTS, "crop_to_patches", "min_patches", "max_patches", "use_covering_area_grid")
_ENOUGH = 0.9
"""Fraction of an image that its tiles must cover at full resolution."""


class Ovis2Processor(ImageProcessor):
    """The mark is `<image>`. All tokens of a span have vectors, separators too."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: OvisFacts = facts.tower
        mark = token_of(tokenizer, "<image>")
        super().__init__(mark, self.facts.image_id, self.facts.size_out, tokenizer)
        side = self.facts.vit.image
        self.settings = stored_settings(path, size={"height": side, "width": side})

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Image.Image)
        keys, side = override_settings(self.settings, arguments, _KNOWN), self.facts.vit.image
        try:
            finish = PixelScaling.read(keys, CLIP_MEAN, CLIP_STD)
            resample, most = resample_of(keys, Image.Resampling.BICUBIC), count_of(keys, "max_patches", 12)
            if fitted(size_of(keys), (side, side)) != (side, side):
                raise keys.wrong("size", f"{side} x {side} pixels")
            grid = (1, 1)
            if keys.flag("crop_to_patches") and most > 1:
                size = content.size[::-1]
                covers = keys.flag("use_covering_area_grid", True)
                least = keys.size("min_patches", 1)
                grid = covering(size, side, most) if covers else nearest_grid(size, side, least, most)
            tiles = resized(content, (side, side), resample)[None]
            if grid != (1, 1):
                whole = (grid[0] * side, grid[1] * side)
                tiles = np.concatenate((tiles, tiled(resized(content, whole, resample), (side, side))))
        except ConfigError as error:
            raise wrong_argument(error) from error
        arrays = finish(tiles) | {"grid": Array.of(np.zeros(grid, np.int8))}
        return ProcessedItem(self.span(*grid), arrays=arrays)

    def span(self, rows: int, columns: int) -> list[int]:
        begin, whole, column, row, end = self.facts.mark_ids
        tile = [self.image_id] * self.facts.tokens
        ids = [begin, *tile, whole]
        for number in range(1, rows * columns + 1 if rows * columns > 1 else 1):
            ids += tile if number == rows * columns else [*tile, column if number % columns else row]
        return [*ids, end]

    def embeds_span(self, num_vectors: int) -> list[int]:
        span = self.span(1, 1)
        if num_vectors != len(span):
            raise RequestError(
                f"image_embeds: {num_vectors} vectors, expected {len(span)}, separators included",
                "multi_modal_data",
            )
        return span

    def build_item(self, token_ids: list[int], place: int | None = None, **more: Any) -> ProcessedItem:
        return ProcessedItem(token_ids, **more)

    def most_vectors(self, modality: str) -> int:
        most = self.settings.size("max_patches", 12) if self.settings.flag("crop_to_patches") else 1
        return len(self.span(1, most))

    def largest(self, modality: str) -> tuple[int, ...]:
        side = self.facts.vit.image
        most = self.settings.size("max_patches", 12) if self.settings.flag("crop_to_patches") else 1
        return side * most, side


@lru_cache(maxsize=16)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return all grids with a number of tiles in this range, ordered by it."""
    pairs = [(one, other) for one in range(1, most + 1) for other in range(1, most + 1)]
    return sorted((pair for pair in pairs if least <= pair[0] * pair[1] <= most), key=lambda e: e[0] * e[1])


@lru_cache(maxsize=256)
def covering(size: tuple[int, int], side: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of the fewest tiles that cover enough of an image of this height and width.

    Rows of the search are used as columns, as in training.
    """
    shown = {grid: _shown(size, grid, side) / (size[0] * size[1]) for grid in _grids(1, most)}
    enough = [grid for grid in shown if shown[grid] > _ENOUGH]
    if enough:
        best = min(enough, key=lambda grid: (grid[0] * grid[1], -shown[grid]))
    else:
        best = min(shown, key=lambda grid: (-shown[grid], grid[0] * grid[1]))
    return best[1], best[0]


def _shown(size: tuple[int, int], grid: tuple[int, int], side: int) -> float:
    """Return the pixels of the parts of an image after each is shrunk to a tile."""
    edges = [
        [length // count] * (count - 1) + [length - length // count * (count - 1)]
        for length, count in zip(size, grid, strict=True)
    ]
    total = 0.0
    for high in edges[0]:
        for wide in edges[1]:
            long, short = max(high, wide), min(high, wide)
            total += short / long * side * side if long > side else long * short
    return total


def nearest_grid(size: tuple[int, int], side: int, least: int, most: int) -> tuple[int, int]:
    """Return the rows and columns nearest to the aspect ratio of the image."""
    ratio, area = size[1] / size[0], size[0] * size[1]
    best, off = (1, 1), float("inf")
    for grid in _grids(least, most):
        distance = abs(ratio - grid[0] / grid[1])
        if distance < off or (distance == off and area > 0.5 * side * side * grid[0] * grid[1]):
            best, off = grid, distance
    return best[1], best[0]
