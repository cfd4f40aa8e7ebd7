"""Aya Vision and Command A Vision: an image in tiles and as a whole, with marker tokens between them."""

from pathlib import Path

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.aya import AyaFacts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import Size, processor_settings, stored_settings
from quire.multimodal.processors.image_base import token_of
from quire.multimodal.processors.tiling import TiledProcessor, grids
from quire.text.tokenizer import Tokenizer

_MARK = "<image>"


class AyaProcessor(TiledProcessor):
    """Processor of Aya Vision. In the span of an image, a number as text precedes each tile. The placeholder
    in prompts is `<image>`, which is not a token of every tokenizer."""

    facts: AyaFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer, mark=tokenizer.backend.token_to_id(_MARK))
        self.settings = self.settings.but(crop_to_patches=True)  # regardless of the checkpoint's file
        stored = processor_settings(path)
        self.begin = str(stored.get("start_of_img_token") or "<|START_OF_IMG|>")
        self.end = str(stored.get("end_of_img_token") or "<|END_OF_IMG|>")
        self.tile = str(stored.get("tile_token") or "TILE")
        self.whole = str(stored.get("tile_global_token") or "TILE_GLOBAL")
        for token in (self.begin, self.end):
            token_of(tokenizer, token)

    def text(self, modality: str, number: int) -> str:
        return _MARK

    def rewrite_text(self, text: str) -> str:
        place = self.tokenizer.backend.id_to_token(self.image_id) or ""
        return text if self.mark != self.image_id else text.replace(_MARK, place)

    def span(self, num_tiles: int) -> list[int]:
        place = self.tokenizer.backend.id_to_token(self.image_id) or ""
        tiles = "".join(f"{self.tile}_{number}{place}" for number in range(1, num_tiles))
        return self.expand(f"{self.begin}{tiles}{self.whole}{place}{self.end}")


class Cohere2VisionProcessor(AyaProcessor):
    """Processor of Command A Vision. In the span of an image, a line-break token follows each tile. The
    placeholder in prompts is the image token."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer)
        self.mark = self.image_id
        self.settings = stored_settings(path, crop_to_patches=True)
        names = (self.begin, "<|IMG_LINE_BREAK|>", self.end)
        self.begin_id, self.break_id, self.end_id = (token_of(tokenizer, name) for name in names)

    def text(self, modality: str, number: int) -> str:
        return self.tokenizer.backend.id_to_token(self.image_id) or ""

    def rewrite_text(self, text: str) -> str:
        return text

    def grid(self, image: Size, keys: ConfigReader, least: int, most: int) -> Size:
        """Return the rows and columns of tiles that enlarge an image the least or, if no grid is large
        enough, shrink it the least."""
        (height, width), side = image, self.facts.vit.image
        scales = {
            (rows, columns): min(columns * side / width, rows * side / height)
            for columns, rows in grids(1, most)
        }
        growing = {grid: scale for grid, scale in scales.items() if scale >= 1}
        return min(growing, key=growing.__getitem__) if growing else max(scales, key=scales.__getitem__)

    def span(self, num_tiles: int) -> list[int]:
        tile = [*[self.image_id] * self.facts.tokens, self.break_id]
        return [self.begin_id, *tile * num_tiles, self.end_id]
