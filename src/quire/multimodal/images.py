"""Image operations of the processors: resize, crop, tile, normalize, as in transformers with Pillow."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
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
"""RGB pixels, [height, width, 3]."""
Size = tuple[int, int]
"""Height and width in pixels, or rows and columns of a grid."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_LARGEST = 1e4
"""Upper bound of the absolute values of normalized pixels, for the check of settings."""
_MAX_PARTS = 64
_MAX_SIDE = 8192
"""Maximum height or width in pixels that settings may have."""
_MAX_AREA = 2**26
"""Maximum number of pixels of a resized image: an image of one pixel row could be resized to gigabytes."""
MAX_FRAMES = 768
"""Maximum number of frames of a video. Even tiny frames are resized to up to a megabyte each."""
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
"""Names of the mm_processor_kwargs that image processors accept."""


def stored_settings(
    path: Path, part: str = "image_processor", *, older: str = "preprocessor_config.json", **defaults: Any
) -> ConfigReader:
    """Read the settings of a checkpoint's processor: the section `part` of processor_config.json if it
    exists, else the file `older`. The `defaults` apply to settings that are missing there."""
    source = path / "processor_config.json"
    section = read_json(source).get(part) if source.is_file() else None
    if not isinstance(section, dict):
        source = path / older
        section = read_json(source) if source.is_file() else {}
    values = {key: value for key, value in section.items() if value is not None}
    return ConfigReader(str(source), {**defaults, **values})


def video_settings(path: Path, otherwise: ConfigReader) -> ConfigReader:
    """Read the video processor's settings from processor_config.json or else video_preprocessor_config.json.
    Return `otherwise` if the checkpoint has neither."""
    settings = stored_settings(path, "video_processor", older="video_preprocessor_config.json")
    return settings if Path(settings.source).is_file() else otherwise


def processor_settings(path: Path) -> ConfigReader:
    """Read processor_config.json, the settings for images and text together; empty if it is missing."""
    file = path / "processor_config.json"
    return ConfigReader(str(file), read_json(file) if file.is_file() else {})


def override_settings(
    stored: ConfigReader, arguments: Mapping[str, Any], known: Collection[str]
) -> ConfigReader:
    """Return the settings of a checkpoint, overridden by `arguments`, the mm_processor_kwargs of a request.
    Raise a RequestError for an argument whose name is not in `known`."""
    for name in arguments:
        if name not in known:
            raise RequestError(
                f"mm_processor_kwargs: this model's processor has no {name!r}; "
                f"known: {', '.join(sorted(known))}{nearest(name, known)}",
                "mm_processor_kwargs",
            )
    return ConfigReader("mm_processor_kwargs", {**stored.values, **arguments})


@contextmanager
def argument_errors() -> Iterator[None]:
    """Convert a ConfigError of the `with` block to a RequestError that names mm_processor_kwargs as its
    cause."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(str(error), "mm_processor_kwargs") from error


@dataclass(frozen=True)
class PixelScaling:
    """Rescaling and normalization of pixel values. The worker applies it with a lookup table, so that pixels
    are sent as bytes instead of floats."""

    scale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    is_narrow: bool = False
    """Whether the result of every operation is rounded to bfloat16."""

    @classmethod
    def read(
        cls, keys: ConfigReader, mean: tuple[float, ...], std: tuple[float, ...], *, is_narrow: bool = False
    ) -> "PixelScaling":
        scale = keys.number("rescale_factor", 1 / 255) if keys.flag("do_rescale", True) else None
        scaling = cls(scale, None, None, is_narrow)
        if keys.flag("do_normalize", True):
            means, stds = _per_channel(keys, "image_mean", mean), _per_channel(keys, "image_std", std)
            scaling = cls(scale, means, stds, is_narrow)
        if not np.abs(scaling._table).max() < _LARGEST:
            raise ConfigError(
                f"{keys.source}: rescale_factor, image_mean and image_std make pixel values too large"
            )
        return scaling

    @cached_property
    def _table(self) -> NDArray[np.float32]:
        """Build the lookup table [3, 256], which has the normalized value of each byte for each colour
        channel."""
        rounded = _narrowed if self.is_narrow else np.asarray
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            out = np.tile(np.arange(256, dtype=np.float64), (3, 1))
            table = rounded((out if self.scale is None else out * self.scale).astype(np.float32))
            if self.mean is not None and self.std is not None:
                mean, std = (rounded(np.array(value, np.float32))[:, None] for value in (self.mean, self.std))
                table = rounded((rounded(table - mean) / std).astype(np.float32))
        return table

    def __call__(self, pixels: NDArray[np.uint8] | None = None, **more: NDArray[np.uint8]) -> Arrays:
        """Return byte arrays by name, transposed from [..., height, width, 3] to [..., 3, height, width], and
        the lookup table with which the worker normalizes them. The array `pixels` is returned under this
        name."""
        arrays = more if pixels is None else {"pixels": pixels, **more}
        return self.to_arrays(
            **{name: np.stack([array[..., i] for i in range(3)], axis=-3) for name, array in arrays.items()}
        )

    def normalized(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return normalized floats, transposed from [..., height, width, 3] to [..., 3, height, width]."""
        return np.stack([self._table[i][pixels[..., i]] for i in range(3)], axis=-3)

    def to_arrays(self, **arrays: NDArray[np.uint8]) -> Arrays:
        """Return byte arrays [..., 3, height, width] by name, and the lookup table with which the worker
        normalizes them."""
        return {name: Array.of(array) for name, array in arrays.items()} | {TABLE: Array.of(self._table)}


def _narrowed(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32 numbers rounded to the nearest bfloat16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _per_channel(keys: ConfigReader, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = keys.get(key)
    values = default if values is None else values
    values = [values] * 3 if isinstance(values, (int, float)) else values
    if (
        not isinstance(values, (list, tuple))
        or len(values) != 3
        or not all(isinstance(value, (int, float)) and abs(value) < _LARGEST for value in values)
    ):
        raise keys.wrong(key, "a number for each of three channels")
    return tuple(float(value) for value in values)


def count_of(keys: ConfigReader, key: str, default: int) -> int:
    """Return the setting `key`, a maximum number of tiles or crops of an image; raise a ConfigError if it is
    too large."""
    count = keys.size(key, default)
    if count > _MAX_PARTS:
        raise keys.wrong(key, f"{_MAX_PARTS} at most")
    return count


def resample_of(keys: ConfigReader, default: Image.Resampling) -> Image.Resampling:
    value = keys.get("resample")
    try:
        return default if value is None else Image.Resampling(value)
    except (ValueError, TypeError) as error:
        raise keys.wrong("resample", "the number of one of Pillow's filters") from error


def check_frames(count: int) -> None:
    if count > MAX_FRAMES:
        raise RequestError(
            f"the video has {count} frames, and at most {MAX_FRAMES} are allowed: set num_frames of "
            "media_io_kwargs.video"
        )


def resized(image: Image.Image, size: Size, resample: Image.Resampling) -> Pixels:
    height, width = size
    if height * width > _MAX_AREA:
        raise ConfigError(
            f"an image of {image.width} x {image.height} pixels would be resized to {width} x {height}, and "
            f"{_MAX_AREA} pixels are the maximum"
        )
    return np.asarray(image.resize((width, height), resample=resample))


def size_of(keys: ConfigReader, key: str = "size") -> dict[str, int]:
    """Read an image size in pixels: a dict with some of height, width, shortest_edge and longest_edge. In the
    file, it may also be a list of height and width, or the side of a square."""
    size = keys.get(key)
    if isinstance(size, int) and not isinstance(size, bool):
        size = {"height": size, "width": size}
    if isinstance(size, (list, tuple)) and len(size) == 2:
        size = {"height": size[0], "width": size[1]}
    if not isinstance(size, dict):
        raise keys.wrong(key, "an object such as {'height': 336, 'width': 336}")
    sides = {name: value for name, value in size.items() if value is not None}
    if not sides or not all(isinstance(side, int) and 0 < side <= _MAX_SIDE for side in sides.values()):
        raise keys.wrong(key, f"numbers of pixels, {_MAX_SIDE} at most")
    return sides


def fitted(size: Mapping[str, int], image: Size) -> Size:
    """Return the height and width to resize an image to: `height` and `width` of `size` or, if it has a
    shortest_edge, that for the shorter side and the other side in proportion."""
    if "height" in size and "width" in size:
        return size["height"], size["width"]
    if "shortest_edge" in size and "longest_edge" not in size:
        height, width = image
        short, long = min(image), max(image)
        other = int(size["shortest_edge"] * long / short)
        return (other, size["shortest_edge"]) if width <= height else (size["shortest_edge"], other)
    raise ConfigError(f"an image cannot be resized to {dict(size)}: set height and width, or shortest_edge")


def fit_size(image: Size, bounds: Size, *, rounding: Callable[[float], int] = math.floor) -> Size:
    """Return the largest height and width within `bounds` that have the aspect ratio of the image."""
    (height, width), (high, wide) = image, bounds
    along, down = wide / width, high / height
    if along < down:
        return max(1, min(rounding(height * along), high)), wide
    return high, max(1, min(rounding(width * down), wide))


def center_cropped(pixels: Pixels, size: Size) -> Pixels:
    """Return the center of an image, cropped to `size` (height, width) in pixels. An image that is too small
    is padded with zeros."""
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


def pad_to_square(image: Image.Image, mean: tuple[float, ...]) -> Image.Image:
    """Pad an image to a square with the image in the center. `mean` is the padding's colour, from 0 to 1."""
    width, height = image.size
    side = max(image.size)
    if width == height:
        return image
    red, green, blue = (int(value * 255) for value in mean)
    out = Image.new("RGB", (side, side), (red, green, blue))
    out.paste(image, ((side - width) // 2, (side - height) // 2))
    return out


def tiled(pixels: Pixels, tile: Size) -> NDArray[np.uint8]:
    """Cut an image into tiles of this size: [tiles, height, width, 3], row by row. The sides of the image are
    multiples of those of a tile."""
    high, wide = tile
    rows, columns = pixels.shape[0] // high, pixels.shape[1] // wide
    grid = pixels.reshape(rows, high, columns, wide, 3).transpose(0, 2, 1, 3, 4)
    return grid.reshape(rows * columns, high, wide, 3)
