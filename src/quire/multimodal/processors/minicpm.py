"""MiniCPM-V: an image as a whole, and if it is large in slices, row by row; each has a number. A video is its
frames, each like an image."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.minicpm import MiniCPMFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError, RequestError
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    MOST_FRAMES,
    Pixels,
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

_BEGIN, _END, _SLICE, _SLICED = "<image>", "</image>", "<slice>", "</slice>"
_WRITTEN, _FILMED = "(<image>./</image>)", "(<video>./</video>)"
"""The marks in templates of 2.6 to 4.5; no tokens."""
_OF_A_FRAME = 1
"""Slices that it may have, if nothing else is said."""
_OLDER = {"norm_mean": "image_mean", "norm_std": "image_std"}
_ALWAYS = ("size", "do_resize")
"""What nobody may say: sides follow from the image."""
_KNOWN = ("max_slice_nums", "scale_resolution", "slice_mode", *(set(IMAGE_ARGUMENTS) - set(_ALWAYS)))
_LONGEST = 2048
"""Pixels of a square's side that a request may ask for."""
_LARGEST = 2
"""How many times as many vectors as a square of the same side an image may have as a whole: a narrow one has
more."""


class Cut(NamedTuple):
    """How an image is seen."""

    whole: Size
    """What it is resized to,"""
    each: Size
    """and each of its slices, which are so many"""
    rows: int
    columns: int


class MiniCPMVProcessor(ImageProcessor):
    """The mark is the token of a single place; of a video of 2.6 to 4.5 a slice of one."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: MiniCPMFacts = facts.tower
        self.modalities = facts.modalities
        image_id = self.facts.image_id
        image_id = token_of(tokenizer, "<unk>") if image_id is None else image_id
        super().__init__(image_id, image_id, self.facts.size_out, tokenizer)
        self.video_id = image_id if self.facts.video_id is None else self.facts.video_id
        stored = stored_settings(path)
        older = {new: stored.get(old) for old, new in _OLDER.items() if stored.get(old) is not None}
        self.settings = stored.but(**older)
        self.film = video_settings(path, self.settings.but(max_slice_nums=_OF_A_FRAME))
        self.is_numbered = stored.flag("use_image_id", self.facts.image_id is not None)
        self.places = {
            "image": tokenizer.backend.id_to_token(image_id) or "",
            "video": tokenizer.backend.id_to_token(self.video_id) or "",
        }
        """The text of a single place."""

    def marks(self, modality: str) -> list[int]:
        if modality == "image" or self.video_id != self.image_id:
            return [self.video_id if modality == "video" else self.mark]
        return self.tokenizer.encode(self._film_mark, add_special_tokens=False)

    @property
    def _film_mark(self) -> str:
        place = self.places["video"]
        return place if self.video_id != self.image_id else f"{_SLICE}{place}{_SLICED}"

    def text(self, modality: str, number: int) -> str:
        if self.facts.image_id is None:
            return _FILMED if modality == "video" else _WRITTEN
        return self._film_mark if modality == "video" else self.places[modality]

    def spelled(self, text: str) -> str:
        """Marks become tokens, with their numbers in front."""
        text = text.replace(_WRITTEN, self.places["image"]).replace(_FILMED, self._film_mark)
        if self.is_numbered:
            for place in {*self.places.values()}:
                text = _numbered(text, place)
        return text

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        try:
            keys = override_settings(self.film if modality == "video" else self.settings, arguments, _KNOWN)
            finish, resample = (
                PixelScaling.read(keys, HALF, HALF),
                resample_of(keys, Image.Resampling.BICUBIC),
            )
            if isinstance(content, Video):
                return self._filmed(content, keys, finish, resample)
            assert isinstance(content, Image.Image)
            cut = self._cut(content.size[::-1], keys)
            arrays = finish(**_squares(content, cut, resample))
        except ConfigError as error:
            raise wrong_argument(error) from error
        return self.spread(self._span(cut, keys), arrays=arrays)

    def _filmed(
        self, video: Video, keys: ConfigReader, finish: PixelScaling, resample: Image.Resampling
    ) -> ProcessedItem:
        """Its frames one behind the other, none of which has a number."""
        check_frames(len(video.frames))
        cut = self._cut(video.frames.shape[1:3], keys)
        seen = [_squares(Image.fromarray(frame), cut, resample) for frame in video.frames]
        span = self._span(cut, keys, "video") * len(seen)
        arrays = finish(**{name: np.stack([each[name] for each in seen]) for name in seen[0]})
        return self.spread(span, place=self.video_id, arrays=arrays)

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        check_frames(len(video.frames))
        try:
            keys = override_settings(self.film, arguments, _KNOWN)
            cut = self._cut(video.frames.shape[1:3], keys)
        except ConfigError as error:
            raise wrong_argument(error) from error
        of_slices = cut.rows * cut.columns * self._count(cut.each, keys) if cut.rows else 0
        return len(video.frames) * (self._count(cut.whole, keys) + of_slices)

    def _cut(self, size: Sequence[int], keys: ConfigReader) -> Cut:
        image, side, most = (size[0], size[1]), _side(keys), count_of(keys, "max_slice_nums", 9)
        rows, columns = grid_of(image, side, most) if keys.flag("slice_mode", True) else (0, 0)
        whole = each = self._fitted(image, side, grows=not rows)
        if rows:
            each = self._fitted(_shared(image, (rows, columns)), side, grows=True)
        return Cut(whole, each, rows, columns)

    def _fitted(self, size: tuple[float, float], side: int, *, grows: bool) -> Size:
        """About as many pixels as a square of this side, in units."""
        unit = self.facts.vit.patch * self.facts.unit
        height, width = size
        if height * width > side * side or grows:
            ratio = width / height
            height = int(side / math.sqrt(ratio))
            width = int(height * ratio)
        return _near(height, unit), _near(width, unit)

    def _count(self, size: Size, keys: ConfigReader) -> int:
        """Vectors of one of the squares."""
        if self.facts.queries:
            return self.facts.queries
        count, most = size[0] * size[1] // (self.facts.vit.patch * self.facts.unit) ** 2, self._most(keys)
        if count > most:
            raise RequestError(
                f"the image is too narrow: as a whole it would have {count} vectors, and {most} are the most"
            )
        return count

    def _most(self, keys: ConfigReader) -> int:
        unit = self.facts.vit.patch * self.facts.unit
        return self.facts.queries or _LARGEST * max(1, round(_side(keys) / unit)) ** 2

    def _span(self, cut: Cut, keys: ConfigReader, modality: str = "image") -> list[int]:
        count = self._count(cut.whole, keys)
        return self._spelled_out(
            count, self._count(cut.each, keys) if cut.rows else 0, (cut.rows, cut.columns), modality
        )

    def _spelled_out(self, count: int, each: int, grid: Size, modality: str = "image") -> list[int]:
        place, place_id = self.places[modality], self.video_id if modality == "video" else self.image_id
        slices = "\n".join([f"{_SLICE}{place}{_SLICED}" * grid[1]] * grid[0])
        token_ids = self.tokenizer.encode(f"{_BEGIN}{place}{_END}{slices}", add_special_tokens=False)
        counts = iter([count, *[each] * (grid[0] * grid[1])])
        return [i for i in token_ids for _ in range(next(counts) if i == place_id else 1)]

    def brought(self, num_vectors: int) -> list[int]:
        return self._spelled_out(num_vectors, 0, (0, 0))

    def most_vectors(self, modality: str) -> int:
        keys = self.film if modality == "video" else self.settings
        most = count_of(keys, "max_slice_nums", 9) if keys.flag("slice_mode", True) else 0
        return (
            self._most(keys) * (1 + (most if most > 1 else 0)) * (MOST_FRAMES if modality == "video" else 1)
        )

    def largest(self, modality: str) -> tuple[int, ...]:
        keys = self.film if modality == "video" else self.settings
        side = _side(keys)
        size = side * count_of(keys, "max_slice_nums", 9), side
        return (MOST_FRAMES, *size) if modality == "video" else size


def _numbered(text: str, place: str) -> str:
    """With a number in front of every mark that is this; those of a span are none."""
    numbers, one = itertools.count(), re.escape(place)

    def numbered(mark: re.Match[str]) -> str:
        if mark.group() != place or text.endswith("</image_id>", 0, mark.start()):
            return mark.group()
        return f"<image_id>{next(numbers)}</image_id>{place}"

    return re.sub(f"(?:<image>|<slice>)(?:{one})+|{one}", numbered, text)


def _squares(image: Image.Image, cut: Cut, resample: Image.Resampling) -> dict[str, Pixels]:
    """As a whole, and in slices."""
    whole = {"pixels": resized(image, cut.whole, resample)}
    if not cut.rows:
        return whole
    large = resized(image, (cut.each[0] * cut.rows, cut.each[1] * cut.columns), resample)
    return whole | {"slices": tiled(large, cut.each)}


def _side(keys: ConfigReader) -> int:
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
