"""Ovis 2: a whole image and, if it is large enough, its tiles, with separator tokens between them."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.ovis import OvisFacts
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array
from quire.errors import RequestError
from quire.multimodal.images import PixelScaling, Size
from quire.multimodal.processors import ProcessedItem
from quire.multimodal.processors.image_base import token_of
from quire.multimodal.processors.tiling import TiledProcessor, grids
from quire.text.tokenizer import Tokenizer

_ENOUGH = 0.9
"""Fraction of the pixels of an image that its tiles must show without shrinking."""


class Ovis2Processor(TiledProcessor):
    """Processor of Ovis 2. The placeholder in prompts is `<image>`. Embeddings replace all tokens of a span,
    also the separators between tiles."""

    arguments = (*TiledProcessor.arguments, "use_covering_area_grid")
    facts: OvisFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        side = facts.tower.vit.image
        size = {"height": side, "width": side}
        super().__init__(path, facts, tokenizer, mark=token_of(tokenizer, "<image>"), size=size)

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        self.check_square(keys)
        grid = self.grid_of(image, keys)
        tiles = self.resize_to_square(image, keys)[None]
        if grid != (1, 1):
            tiles = np.concatenate((tiles, self.cut(image, grid, keys)))
        arrays = scaling(tiles) | {"grid": Array.of(np.zeros(grid, np.int8))}
        return ProcessedItem(self._grid_span(*grid), arrays=arrays)

    def grid(self, image: Size, keys: ConfigReader, least: int, most: int) -> Size:
        if keys.flag("use_covering_area_grid", True):
            return covering(image, self.facts.vit.image, most)
        return super().grid(image, keys, least, most)

    def _grid_span(self, rows: int, columns: int) -> list[int]:
        begin, whole, column, row, end = self.facts.mark_ids
        tile = [self.image_id] * self.facts.tokens
        ids = [begin, *tile, whole]
        for number in range(1, rows * columns + 1 if rows * columns > 1 else 1):
            ids += tile if number == rows * columns else [*tile, column if number % columns else row]
        return [*ids, end]

    def embeds_span(self, num_vectors: int) -> list[int]:
        span = self._grid_span(1, 1)
        if num_vectors != len(span):
            raise RequestError(
                f"image_embeds: {num_vectors} vectors, expected {len(span)}, separators included",
                "multi_modal_data",
            )
        return span

    def build_item(self, token_ids: list[int], place: int | None = None, **more: Any) -> ProcessedItem:
        return ProcessedItem(token_ids, **more)

    def max_vectors(self, modality: str) -> int:
        return len(self._grid_span(1, self.max_tiles))


@lru_cache(maxsize=256)
def covering(size: Size, side: int, most: int) -> Size:
    """Return the rows and columns of the fewest tiles that show enough pixels of an image of this height and
    width. The numbers of rows and columns are swapped, since the model was trained with this order."""
    shown = {grid: _shown(size, grid, side) / (size[0] * size[1]) for grid in grids(1, most)}
    enough = [grid for grid in shown if shown[grid] > _ENOUGH]
    if enough:
        best = min(enough, key=lambda grid: (grid[0] * grid[1], -shown[grid]))
    else:
        best = min(shown, key=lambda grid: (-shown[grid], grid[0] * grid[1]))
    return best[1], best[0]


def _shown(size: Size, grid: Size, side: int) -> float:
    """Return the number of pixels that an image has after it is cut into `grid` (rows, columns), and parts
    larger than a tile of `side` pixels are reduced to a tile."""
    edges = [
        [length // count] * (count - 1) + [length - length // count * (count - 1)]
        for length, count in zip(size, grid, strict=True)
    ]
    parts = (sorted((high, wide)) for high in edges[0] for wide in edges[1])
    # `sum` compensates rounding errors since Python 3.12: the choice among equal grids depends on it.
    return sum(short / long * side * side if long > side else long * short for short, long in parts)
