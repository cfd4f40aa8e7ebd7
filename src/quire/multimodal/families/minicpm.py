"""MiniCPM-V: an image as a whole, and if it is large in slices, row by row; each has a number."""

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from quire.config.facts import MediaFacts
from quire.config.keys import Keys
from quire.config.media.minicpm import MiniCPMFacts
from quire.errors import ConfigError, RequestError
from quire.multimodal.families import Content, Processed
from quire.multimodal.families.pictures import Pictures, token_of
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    Finish,
    Size,
    asked,
    count_of,
    resample_of,
    resized,
    stored_settings,
    tiled,
    wrong_argument,
)
from quire.text.tokenizer import Tokenizer

_BEGIN, _END, _SLICE, _SLICED = "<image>", "</image>", "<slice>", "</slice>"
_WRITTEN = "(<image>./</image>)"
"""The mark in templates of 2.6 to 4.5; no token."""
_OLDER = {"norm_mean": "image_mean", "norm_std": "image_std"}
_ALWAYS = ("size", "do_resize")
"""What nobody may say: sides follow from the image."""
_KNOWN = ("max_slice_nums", "scale_resolution", "slice_mode", *(set(IMAGE_ARGUMENTS) - set(_ALWAYS)))
_LONGEST = 2048
"""Pixels of a square's side that a request may ask for."""
_LARGEST = 2
"""How many times as many vectors as a square of the same side an image may have as a whole: a narrow one has
more."""


class MiniCPMVProcessor(Pictures):
    """The mark is the token of a single place."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: MiniCPMFacts = facts.tower
        image_id = self.facts.image_id
        image_id = token_of(tokenizer, "<unk>") if image_id is None else image_id
        super().__init__(image_id, image_id, self.facts.size_out, tokenizer)
        stored = stored_settings(path)
        older = {new: stored.get(old) for old, new in _OLDER.items() if stored.get(old) is not None}
        self.settings = stored.but(**older)
        self.is_numbered = stored.flag("use_image_id", self.facts.image_id is not None)
        place = re.escape(super().text("image", 1))
        self.marked = re.compile(f"(?:<image>|<slice>)(?:{place})+|{place}")
        """The places of a span, or a mark."""

    def text(self, modality: str, number: int) -> str:
        return _WRITTEN if self.facts.image_id is None else super().text(modality, number)

    def spelled(self, text: str) -> str:
        """Marks become tokens, with their numbers in front."""
        place = super().text("image", 1)
        text = text.replace(_WRITTEN, place)
        numbers = itertools.count()

        def numbered(mark: re.Match[str]) -> str:
            if mark.group() != place or text.endswith("</image_id>", 0, mark.start()):
                return mark.group()
            return f"<image_id>{next(numbers)}</image_id>{place}"

        return self.marked.sub(numbered, text) if self.is_numbered else text

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> Processed:
        assert isinstance(content, Image.Image)
        try:
            keys = asked(self.settings, arguments, _KNOWN)
            finish = Finish.read(keys, HALF, HALF)
            resample, side = resample_of(keys, Image.Resampling.BICUBIC), _side(keys)
            size, most = content.size[::-1], count_of(keys, "max_slice_nums", 9)
            rows, columns = grid_of(size, side, most) if keys.flag("slice_mode", True) else (0, 0)
            whole = self._fitted(size, side, grows=not rows)
            span = self._span(self._count(whole, keys), 0, (0, 0))
            pixels, slices = resized(content, whole, resample), {}
            if rows:
                each = self._fitted(_shared(size, (rows, columns)), side, grows=True)
                large = resized(content, (each[0] * rows, each[1] * columns), resample)
                slices["slices"] = tiled(large, each)
                span = self._span(self._count(whole, keys), self._count(each, keys), (rows, columns))
        except ConfigError as error:
            raise wrong_argument(error) from error
        return self.spread(span, arrays=finish(pixels, **slices))

    def _fitted(self, size: tuple[float, float], side: int, *, grows: bool) -> Size:
        """About as many pixels as a square of this side, in units."""
        unit = self.facts.vit.patch * self.facts.unit
        height, width = size
        if height * width > side * side or grows:
            ratio = width / height
            height = int(side / math.sqrt(ratio))
            width = int(height * ratio)
        return _near(height, unit), _near(width, unit)

    def _count(self, size: Size, keys: Keys) -> int:
        """Vectors of one of the squares."""
        if self.facts.queries:
            return self.facts.queries
        count, most = size[0] * size[1] // (self.facts.vit.patch * self.facts.unit) ** 2, self._most(keys)
        if count > most:
            raise RequestError(
                f"the image is too narrow: as a whole it would have {count} vectors, and {most} are the most"
            )
        return count

    def _most(self, keys: Keys) -> int:
        unit = self.facts.vit.patch * self.facts.unit
        return self.facts.queries or _LARGEST * max(1, round(_side(keys) / unit)) ** 2

    def _span(self, count: int, each: int, grid: Size) -> list[int]:
        place = super().text("image", 1)
        slices = "\n".join([f"{_SLICE}{place}{_SLICED}" * grid[1]] * grid[0])
        token_ids = self.tokenizer.encode(f"{_BEGIN}{place}{_END}{slices}", add_special_tokens=False)
        counts = iter([count, *[each] * (grid[0] * grid[1])])
        return [i for i in token_ids for _ in range(next(counts) if i == self.image_id else 1)]

    def brought(self, num_vectors: int) -> list[int]:
        return self._span(num_vectors, 0, (0, 0))

    def most_vectors(self, modality: str) -> int:
        most = count_of(self.settings, "max_slice_nums", 9) if self.settings.flag("slice_mode", True) else 0
        return self._most(self.settings) * (1 + (most if most > 1 else 0))

    def largest(self, modality: str) -> tuple[int, int]:
        side = _side(self.settings)
        return side * count_of(self.settings, "max_slice_nums", 9), side


def _side(keys: Keys) -> int:
    side = keys.size("scale_resolution", 448)
    if side > _LONGEST:
        raise keys.wrong("scale_resolution", f"{_LONGEST} at most")
    return side


def _near(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


def _shared(size: Size, grid: Size) -> tuple[float, float]:
    """What each slice has of an image."""
    return _near(size[0], grid[0]) / grid[0], _near(size[1], grid[1]) / grid[1]


def grid_of(image: Size, side: int, most: int) -> Size:
    """Rows and columns of slices: of about as many as the image has squares of this side those that are
    nearest to its shape; none of an image that is no larger than one."""
    height, width = image
    count = min(math.ceil(width * height / (side * side)), most)
    if count <= 1:
        return 0, 0
    grids = [
        (rows, number // rows)
        for number in (count - 1, count, count + 1)
        if 1 < number <= most
        for rows in range(1, number + 1)
        if number % rows == 0
    ]
    shape = math.log(width / height)
    return min(grids, key=lambda grid: (abs(shape - math.log(grid[1] / grid[0])), -grid[0]))
