"""Aya Vision and Command A Vision: an image in tiles and as a whole, with tokens between them."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.aya import AyaFacts
from quire.errors import ConfigError, RequestError
from quire.multimodal.images import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGE_ARGUMENTS,
    PixelScaling,
    Size,
    override_settings,
    processor_settings,
    stored_settings,
    wrong_argument,
)
from quire.multimodal.processors import Content, ProcessedItem
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.multimodal.processors.intern import grid_of, tiles_of
from quire.text.tokenizer import Tokenizer

_KNOWN = (*IMAGE_ARGUMENTS, "crop_to_patches", "min_patches", "max_patches")
_MARK = "<image>"


class AyaProcessor(ImageProcessor):
    """Each tile has its number as text before it. The mark is `<image>`, which may not be a token."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: AyaFacts = facts.tower
        mark = tokenizer.backend.token_to_id(_MARK)
        image_id = self.facts.image_id
        super().__init__(image_id if mark is None else mark, image_id, self.facts.size_out, tokenizer)
        self.settings = stored_settings(path).but(crop_to_patches=True)  # overrides the file
        stored = processor_settings(path)
        self.begin = str(stored.get("start_of_img_token") or "<|START_OF_IMG|>")
        self.end = str(stored.get("end_of_img_token") or "<|END_OF_IMG|>")
        self.tile = str(stored.get("tile_token") or "TILE")
        self.whole = str(stored.get("tile_global_token") or "TILE_GLOBAL")
        for token in (self.begin, self.end):
            token_of(tokenizer, token)

    def text(self, modality: str, number: int) -> str:
        return _MARK

    def spelled(self, text: str) -> str:
        place = self.tokenizer.backend.id_to_token(self.image_id) or ""
        return text if self.mark != self.image_id else text.replace(_MARK, place)

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Image.Image)
        try:
            keys = override_settings(self.settings, arguments, _KNOWN)
            finish = PixelScaling.read(keys, CLIP_MEAN, CLIP_STD)
            tiles = tiles_of(content, keys, self.facts.vit.image, self.grid)
        except ConfigError as error:
            raise wrong_argument(error) from error
        return self.build_item(self.span(len(tiles)), arrays=finish(tiles))

    @staticmethod
    def grid(image: Size, side: int, least: int, most: int) -> tuple[int, int]:
        """Return the rows and columns of tiles."""
        return grid_of(image, side, least, most)

    def span(self, num_tiles: int) -> list[int]:
        place = self.tokenizer.backend.id_to_token(self.image_id) or ""
        tiles = "".join(f"{self.tile}_{number}{place}" for number in range(1, num_tiles))
        text = f"{self.begin}{tiles}{self.whole}{place}{self.end}"
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [i for i in token_ids for _ in range(self.facts.tokens if i == self.image_id else 1)]

    def embeds_span(self, num_vectors: int) -> list[int]:
        if num_vectors % self.facts.tokens:
            many = f"a multiple of {self.facts.tokens}"
            raise RequestError(f"image_embeds: {num_vectors} vectors, expected {many}", "multi_modal_data")
        return self.span(num_vectors // self.facts.tokens)

    def most_vectors(self, modality: str) -> int:
        most = self.settings.size("max_patches", 12) if self.settings.flag("crop_to_patches") else 1
        return self.facts.tokens * (most + (most > 1))

    def largest(self, modality: str) -> tuple[int, ...]:
        side, count = self.facts.vit.image, self.most_vectors(modality) // self.facts.tokens
        return side * max(1, count - 1), side


class Cohere2VisionProcessor(AyaProcessor):
    """A line-break token follows each tile; the mark is the image token."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer)
        self.mark = self.image_id
        self.settings = stored_settings(path, crop_to_patches=True)
        names = (self.begin, "<|IMG_LINE_BREAK|>", self.end)
        self.begin_id, self.break_id, self.end_id = (token_of(tokenizer, name) for name in names)

    def text(self, modality: str, number: int) -> str:
        return self.tokenizer.backend.id_to_token(self.image_id) or ""

    def spelled(self, text: str) -> str:
        return text

    @staticmethod
    def grid(image: Size, side: int, least: int, most: int) -> tuple[int, int]:
        """Return the grid that enlarges an image the least or, if none does, shrinks it the least."""
        height, width = image
        scales = {grid: min(grid[1] * side / width, grid[0] * side / height) for grid in _grids(most)}
        growing = {grid: scale for grid, scale in scales.items() if scale >= 1}
        return min(growing, key=growing.__getitem__) if growing else max(scales, key=scales.__getitem__)

    def span(self, num_tiles: int) -> list[int]:
        tile = [*[self.image_id] * self.facts.tokens, self.break_id]
        return [self.begin_id, *tile * num_tiles, self.end_id]


@lru_cache
def _grids(most: int) -> list[tuple[int, int]]:
    """Return all grids of rows and columns, ordered by their number of tiles, then by columns."""
    sides = range(1, most + 1)
    every = [(high, wide) for wide in sides for high in sides if wide * high <= most]
    return sorted(every, key=lambda grid: grid[0] * grid[1])
