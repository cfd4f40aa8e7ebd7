"""Images as numbers: what the processors of all families do to them, as transformers with Pillow."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.reader import ConfigReader, read_json
from quire.data.multimodal import TABLE, Array, Arrays
from quire.errors import ConfigError, RequestError, nearest

Pixels = NDArray[np.uint8]
"""[height, width, 3]"""
Size = tuple[int, int]
"""Height and width."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_LARGEST = 1e4
"""Of numbers that can be pixels."""
_MOST_PARTS = 64
_MOST_PIXELS = 8192
"""Of a side that a request may ask for."""
_MOST_AREA = 2**26
"""Pixels of what an image is resized to: a line of one pixel would become gigabytes."""
MOST_FRAMES = 768
"""Of a video: each may become a megabyte, however small it was."""
IMAGE_ARGUMENTS = (
    "do_resize",
    "size",
    "resample",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "do_convert_rgb",
)
"""What a request may say of images to every processor."""


def stored_settings(path: Path, part: str = "image_processor", **defaults: Any) -> ConfigReader:
    """What a checkpoint says of its processor: the newer file's part wins over the older file, and both over
    the family's own."""
    newer, older = path / "processor_config.json", path / "preprocessor_config.json"
    found = read_json(newer).get(part) if newer.is_file() else None
    source = newer
    if not isinstance(found, dict):
        source, found = older, read_json(older) if older.is_file() else {}
    said = {key: value for key, value in found.items() if value is not None}
    return ConfigReader(str(source), {**defaults, **said})


def film_settings(path: Path, otherwise: ConfigReader) -> ConfigReader:
    """What it says of videos: a part of the newer file, or a file of its own; else they are as said."""
    newer, own = path / "processor_config.json", path / "video_preprocessor_config.json"
    if newer.is_file() and isinstance(read_json(newer).get("video_processor"), dict):
        return stored_settings(path, "video_processor")
    if own.is_file():
        return ConfigReader(
            str(own), {key: value for key, value in read_json(own).items() if value is not None}
        )
    return otherwise


def whole_settings(path: Path) -> ConfigReader:
    """What it says of images and text together."""
    file = path / "processor_config.json"
    return ConfigReader(str(file), read_json(file) if file.is_file() else {})


def asked(stored: ConfigReader, arguments: Mapping[str, Any], known: Collection[str]) -> ConfigReader:
    """The same with what a request wants otherwise."""
    for name in arguments:
        if name not in known:
            raise RequestError(
                f"mm_processor_kwargs: this model's processor has no {name!r}; "
                f"known: {', '.join(sorted(known))}{nearest(name, known)}",
                "mm_processor_kwargs",
            )
    return ConfigReader("mm_processor_kwargs", {**stored.values, **arguments})


def wrong_argument(error: ConfigError) -> RequestError:
    return RequestError(str(error), "mm_processor_kwargs")


@dataclass(frozen=True)
class PixelScaling:
    """From bytes to numbers: scaled, mean and spread taken out. It is not done here: bytes travel lighter."""

    scale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    is_narrow: bool = False
    """Whether all of it is done in bfloat16."""

    @classmethod
    def read(
        cls, keys: ConfigReader, mean: tuple[float, ...], std: tuple[float, ...], *, is_narrow: bool = False
    ) -> "PixelScaling":
        scale = keys.number("rescale_factor", 1 / 255) if keys.flag("do_rescale", True) else None
        finish = cls(scale, None, None, is_narrow)
        if keys.flag("do_normalize", True):
            means, stds = _per_channel(keys, "image_mean", mean), _per_channel(keys, "image_std", std)
            finish = cls(scale, means, stds, is_narrow)
        if not np.abs(finish._table).max() < _LARGEST:
            raise ConfigError(
                f"{keys.source}: rescale_factor, image_mean and image_std make numbers too large"
            )
        return finish

    @cached_property
    def _table(self) -> NDArray[np.float32]:
        """What becomes of each byte, [3, 256]."""
        rounded = _narrowed if self.is_narrow else np.asarray
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self._finished(rounded)

    def _finished(self, rounded: Callable[[Any], NDArray[np.float32]]) -> NDArray[np.float32]:
        out = np.tile(np.arange(256, dtype=np.float64), (3, 1))
        table = rounded((out if self.scale is None else out * self.scale).astype(np.float32))
        if self.mean is not None and self.std is not None:
            mean, std = (rounded(np.array(each, np.float32))[:, None] for each in (self.mean, self.std))
            table = rounded((rounded(table - mean) / std).astype(np.float32))
        return table

    def __call__(self, pixels: NDArray[np.uint8], **more: NDArray[np.uint8]) -> Arrays:
        """[..., height, width, 3] each -> [..., 3, height, width], still bytes."""
        given = {"pixels": pixels, **more}
        return self.told(
            **{name: np.stack([each[..., i] for i in range(3)], axis=-3) for name, each in given.items()}
        )

    def numbers(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The same of one, done here: for who goes on with it."""
        return np.stack([self._table[i][pixels[..., i]] for i in range(3)], axis=-3)

    def told(self, **given: NDArray[np.uint8]) -> Arrays:
        """Bytes [..., 3, height, width], and what is to become of each on the device of the tower."""
        return {name: Array.of(each) for name, each in given.items()} | {TABLE: Array.of(self._table)}


def _narrowed(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest numbers of bfloat16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _per_channel(keys: ConfigReader, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    found = keys.get(key)
    found = default if found is None else found
    found = [found] * 3 if isinstance(found, (int, float)) else found
    if (
        not isinstance(found, (list, tuple))
        or len(found) != 3
        or not all(isinstance(each, (int, float)) and abs(each) < _LARGEST for each in found)
    ):
        raise keys.wrong(key, "a number for each of three channels")
    return tuple(float(each) for each in found)


def count_of(keys: ConfigReader, key: str, default: int) -> int:
    """How many tiles or crops an image may have: so many that they can all be looked at."""
    count = keys.size(key, default)
    if count > _MOST_PARTS:
        raise keys.wrong(key, f"{_MOST_PARTS} at most")
    return count


def resample_of(keys: ConfigReader, default: Image.Resampling) -> Image.Resampling:
    found = keys.get("resample")
    try:
        return default if found is None else Image.Resampling(found)
    except (ValueError, TypeError) as error:
        raise keys.wrong("resample", "the number of one of Pillow's filters") from error


def check_frames(count: int) -> None:
    if count > MOST_FRAMES:
        raise RequestError(
            f"{count} frames of a video are more than {MOST_FRAMES}: ask for fewer by num_frames of "
            "media_io_kwargs.video"
        )


def resized(image: Image.Image, size: Size, resample: Image.Resampling) -> Pixels:
    height, width = size
    if height * width > _MOST_AREA:
        raise ConfigError(
            f"an image of {image.width} x {image.height} pixels would become one of {width} x {height}, and "
            f"{_MOST_AREA} pixels are the most"
        )
    return np.asarray(image.resize((width, height), resample=resample))


def size_of(keys: ConfigReader, key: str = "size") -> dict[str, int]:
    """Some of height, width, shortest_edge, longest_edge; a single number is a square's side."""
    found = keys.get(key)
    if isinstance(found, int) and not isinstance(found, bool):
        found = {"height": found, "width": found}
    if isinstance(found, (list, tuple)) and len(found) == 2:
        found = {"height": found[0], "width": found[1]}
    if not isinstance(found, dict):
        raise keys.wrong(key, "an object such as {'height': 336, 'width': 336}")
    said = {name: value for name, value in found.items() if value is not None}
    if not said or not all(isinstance(each, int) and 0 < each <= _MOST_PIXELS for each in said.values()):
        raise keys.wrong(key, f"numbers of pixels, {_MOST_PIXELS} at most")
    return said


def fitted(size: Mapping[str, int], image: Size) -> Size:
    """What an image is resized to: exactly, or until its shorter edge is so long."""
    if "height" in size and "width" in size:
        return size["height"], size["width"]
    if "shortest_edge" in size and "longest_edge" not in size:
        height, width = image
        short, long = min(image), max(image)
        other = int(size["shortest_edge"] * long / short)
        return (other, size["shortest_edge"]) if width <= height else (size["shortest_edge"], other)
    raise ConfigError(f"an image cannot be resized to {dict(size)}: give height and width, or shortest_edge")


def center_cropped(pixels: Pixels, size: Size) -> Pixels:
    """Its middle; zeros around an image that is too small."""
    height, width = pixels.shape[:2]
    high, wide = size
    if high > height or wide > width:
        above, left = (math.ceil(max(0, want - have) / 2) for want, have in ((high, height), (wide, width)))
        larger = np.zeros((max(high, height), max(wide, width), 3), pixels.dtype)
        larger[above : above + height, left : left + width] = pixels
        top, first = (height - high) // 2 + above, (width - wide) // 2 + left
        return larger[max(0, top) : top + high, max(0, first) : first + wide]
    top, first = (height - high) // 2, (width - wide) // 2
    return pixels[top : top + high, first : first + wide]


def squared(image: Image.Image, mean: tuple[float, ...]) -> Image.Image:
    """The image in the middle of a square of its mean colour."""
    width, height = image.size
    side = max(image.size)
    if width == height:
        return image
    red, green, blue = (int(each * 255) for each in mean)
    out = Image.new("RGB", (side, side), (red, green, blue))
    out.paste(image, ((side - width) // 2, (side - height) // 2))
    return out


def tiled(pixels: Pixels, tile: Size) -> NDArray[np.uint8]:
    """Row by row: [tiles, height, width, 3] of an image that they fill."""
    high, wide = tile
    rows, columns = pixels.shape[0] // high, pixels.shape[1] // wide
    grid = pixels.reshape(rows, high, columns, wide, 3).transpose(0, 2, 1, 3, 4)
    return grid.reshape(rows * columns, high, wide, 3)
