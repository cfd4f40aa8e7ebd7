"""MiniCPM-V: a whole image and, if it is large, its slices row by row; a video as a list of such images."""

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
from quire.errors import RequestError
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    MAX_FRAMES,
    Pixels,
    PixelScaling,
    Size,
    argument_errors,
    check_frames,
    count_of,
    tiled,
    video_settings,
)
from quire.multimodal.processors import ProcessedItem, Video
from quire.multimodal.processors.image_base import ImageProcessor, token_of
from quire.text.tokenizer import Tokenizer

_BEGIN, _END, _SLICE, _SLICED = "<image>", "</image>", "<slice>", "</slice>"
_IMAGE_MARK, _VIDEO_MARK = "(<image>./</image>)", "(<video>./</video>)"
"""Placeholders in the chat templates of MiniCPM-V 2.5 to 4.5, which are not tokens."""
_FRAME_SLICES = 1
"""Default maximum number of slices of a video frame."""
_OLDER = {"norm_mean": "image_mean", "norm_std": "image_std"}
_ALWAYS = ("size", "do_resize")
"""mm_processor_kwargs that requests may not set, since the input size follows from the size of the image."""
_LONGEST = 2048
"""Maximum `scale_resolution` that a request may set: the side in pixels of the square of a whole image."""
_LARGEST = 2
"""Maximum number of embeddings of a whole image, as a multiple of that of a square image. Narrower images are
refused."""


class Cut(NamedTuple):
    """Division of an image: the size of the resized whole image, and the size and number of its slices."""

    whole: Size
    """Size to which the whole image is resized."""
    piece: Size
    """Size to which each slice is resized."""
    rows: int
    """Rows of slices; 0 without slices."""
    columns: int


class MiniCPMVProcessor(ImageProcessor):
    """Processor of MiniCPM-V. The placeholder of an image is the image token; that of a video of MiniCPM-V
    2.6 to 4.5 is a slice with one image token. Images may be numbered."""

    arguments = ("max_slice_nums", "scale_resolution", "slice_mode", *(set(IMAGE_ARGUMENTS) - set(_ALWAYS)))
    mean = std = HALF
    facts: MiniCPMFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        unknown = token_of(tokenizer, "<unk>") if facts.tower.image_id is None else None
        super().__init__(path, facts, tokenizer, image_id=unknown)
        image_id, stored = self.image_id, self.settings
        self.video_id = image_id if self.facts.video_id is None else self.facts.video_id
        older = {new: stored.get(old) for old, new in _OLDER.items() if stored.get(old) is not None}
        self.settings = stored.but(**older)
        self.video_settings = video_settings(path, self.settings.but(max_slice_nums=_FRAME_SLICES))
        self.is_numbered = stored.flag("use_image_id", self.facts.image_id is not None)
        self.places = {
            "image": tokenizer.backend.id_to_token(image_id) or "",
            "video": tokenizer.backend.id_to_token(self.video_id) or "",
        }
        """Text of the placeholder token by modality."""

    def marks(self, modality: str) -> list[int]:
        if modality == "image" or self.video_id != self.image_id:
            return [self.video_id if modality == "video" else self.mark]
        return self.tokenizer.encode(self._video_mark, add_special_tokens=False)

    @property
    def _video_mark(self) -> str:
        place = self.places["video"]
        return place if self.video_id != self.image_id else f"{_SLICE}{place}{_SLICED}"

    def text(self, modality: str, number: int) -> str:
        if self.facts.image_id is None:
            return _VIDEO_MARK if modality == "video" else _IMAGE_MARK
        return self._video_mark if modality == "video" else self.places[modality]

    def rewrite_text(self, text: str) -> str:
        """Replace the placeholders of chat templates by tokens, after the numbers of images if they have
        any."""
        text = text.replace(_IMAGE_MARK, self.places["image"])
        if "video" in self.modalities:
            text = text.replace(_VIDEO_MARK, self._video_mark)
        if self.is_numbered:
            for place in {*self.places.values()}:
                text = _number_marks(text, place)
        return text

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        cut = self._cut(image.size[::-1], keys)
        arrays = scaling(**self._squares(image, cut, keys))
        return self.build_item(self._span(cut, keys), arrays=arrays)

    def process_video(self, video: Video, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        """Process the frames of a video in order, as images without numbers."""
        check_frames(len(video.frames))
        cut = self._cut(video.frames.shape[1:3], keys)
        frames = [self._squares(Image.fromarray(frame), cut, keys) for frame in video.frames]
        span = self._span(cut, keys, "video") * len(frames)
        arrays = scaling(**{name: np.stack([frame[name] for frame in frames]) for name in frames[0]})
        return self.build_item(span, place=self.video_id, arrays=arrays)

    def _squares(self, image: Image.Image, cut: Cut, keys: ConfigReader) -> dict[str, Pixels]:
        """Return the resized whole image (`pixels`) and, if there are any, its slices (`slices`)."""
        whole = {"pixels": self.resize(image, cut.whole, keys)}
        if not cut.rows:
            return whole
        large = self.resize(image, (cut.piece[0] * cut.rows, cut.piece[1] * cut.columns), keys)
        return whole | {"slices": tiled(large, cut.piece)}

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        check_frames(len(video.frames))
        with argument_errors():
            keys = self.read_arguments("video", arguments)
            cut = self._cut(video.frames.shape[1:3], keys)
        num_slice_vectors = cut.rows * cut.columns * self._count(cut.piece, keys) if cut.rows else 0
        return len(video.frames) * (self._count(cut.whole, keys) + num_slice_vectors)

    def _cut(self, size: Sequence[int], keys: ConfigReader) -> Cut:
        image, side, most = (size[0], size[1]), _side(keys), count_of(keys, "max_slice_nums", 9)
        rows, columns = grid_of(image, side, most) if keys.flag("slice_mode", True) else (0, 0)
        whole = piece = self._fitted(image, side, grows=not rows)
        if rows:
            piece = self._fitted(_slice_size(image, (rows, columns)), side, grows=True)
        return Cut(whole, piece, rows, columns)

    def _fitted(self, size: tuple[float, float], side: int, *, grows: bool) -> Size:
        """Return `size` (height, width) in pixels, rounded to squares of merged patches. A size larger than a
        square of `side` pixels, or any size if `grows`, is first scaled to about the area of that square."""
        unit = self.facts.vit.patch * self.facts.unit
        height, width = size
        if height * width > side * side or grows:
            ratio = width / height
            height = int(side / math.sqrt(ratio))
            width = int(height * ratio)
        return _near(height, unit), _near(width, unit)

    def _count(self, size: Size, keys: ConfigReader) -> int:
        """Return the number of embeddings of an image or a slice of this size."""
        if self.facts.queries:
            return self.facts.queries
        most = self._max_vectors(keys)
        count = size[0] * size[1] // (self.facts.vit.patch * self.facts.unit) ** 2
        if count > most:
            raise RequestError(
                f"the image is too narrow: it would have {count} vectors, and {most} are the maximum"
            )
        return count

    def _max_vectors(self, keys: ConfigReader) -> int:
        unit = self.facts.vit.patch * self.facts.unit
        return self.facts.queries or _LARGEST * max(1, round(_side(keys) / unit)) ** 2

    def _span(self, cut: Cut, keys: ConfigReader, modality: str = "image") -> list[int]:
        counts = self._count(cut.whole, keys), self._count(cut.piece, keys) if cut.rows else 0
        return self._span_of_counts(*counts, (cut.rows, cut.columns), modality)

    def _span_of_counts(self, count: int, per_slice: int, grid: Size, modality: str = "image") -> list[int]:
        place, place_id = self.places[modality], self.video_id if modality == "video" else self.image_id
        whole, piece = f"{_BEGIN}{place}{_END}", f"{_SLICE}{place}{_SLICED}"
        slices = "\n".join([(whole if self.facts.nests_slices else piece) * grid[1]] * grid[0])
        slices = f"{_SLICE}{slices}{_SLICED}" if slices and self.facts.nests_slices else slices
        token_ids = self.tokenizer.encode(whole + slices, add_special_tokens=False)
        counts = iter([count, *[per_slice] * (grid[0] * grid[1])])
        return [i for i in token_ids for _ in range(next(counts) if i == place_id else 1)]

    def embeds_span(self, num_vectors: int) -> list[int]:
        return self._span_of_counts(num_vectors, 0, (0, 0))

    def max_vectors(self, modality: str) -> int:
        keys = self.video_settings if modality == "video" else self.settings
        most = count_of(keys, "max_slice_nums", 9) if keys.flag("slice_mode", True) else 0
        num_frames = MAX_FRAMES if modality == "video" else 1
        return self._max_vectors(keys) * (1 + (most if most > 1 else 0)) * num_frames

    def largest(self, modality: str) -> tuple[int, ...]:
        keys = self.video_settings if modality == "video" else self.settings
        side = _side(keys)
        size = side * count_of(keys, "max_slice_nums", 9), side
        return (MAX_FRAMES, *size) if modality == "video" else size


def _number_marks(text: str, place: str) -> str:
    """Return the text with a number before every placeholder `place` of an image, but not before those of an
    expanded span."""
    numbers, one = itertools.count(), re.escape(place)

    def with_number(mark: re.Match[str]) -> str:
        if mark.group() != place or text.endswith("</image_id>", 0, mark.start()):
            return mark.group()
        return f"<image_id>{next(numbers)}</image_id>{place}"

    return re.sub(f"(?:<image>|<slice>)(?:{one})+|{one}", with_number, text)


def _side(keys: ConfigReader) -> int:
    side = keys.size("scale_resolution", 448)
    if side > _LONGEST:
        raise keys.wrong("scale_resolution", f"{_LONGEST} at most")
    return side


def _near(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


def _slice_size(size: Size, grid: Size) -> tuple[float, float]:
    """Return the (height, width) in pixels of the part of an image that becomes one slice of `grid`."""
    return _near(size[0], grid[0]) / grid[0], _near(size[1], grid[1]) / grid[1]


def grid_of(image: Size, side: int, most: int) -> Size:
    """Return the rows and columns of slices of an image, near its aspect ratio: about as many slices as it
    has squares of `side` pixels, and at most `most`. Return 0 and 0 if it is not larger than one square."""
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
