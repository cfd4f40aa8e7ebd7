"""Settings of the processors with a grid of patches, from the checkpoint and from mm_processor_kwargs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import RequestError, nearest
from quire.multimodal.images import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    PixelScaling,
    resample_of,
    stored_settings,
    video_settings,
)

_MAX_UNEQUAL = 200
"""Maximum ratio of the longer to the shorter side of an image."""
_MAX_GROWN = 1 << 20
"""Maximum `min_pixels` of a request, the number of pixels to which smaller images or frames are enlarged."""
_MAX_FPS = 1000
_LARGEST = 1 << 63
"""Upper bound of numeric arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSettings:
    """Settings by which images or videos are resized and cut into patches."""

    patch: int
    frames: int
    """Number of frames in a patch (temporal_patch_size)."""
    merge: int
    least: int
    """Minimum number of pixels; smaller images and frames are enlarged."""
    most: int
    counts_frames: bool = False
    """Whether `least` and `most` are for all frames of a video together, not for each frame."""
    enlarges_sides: bool = False
    """Whether a side shorter than `unit` is enlarged to `unit`, and the other side in proportion."""
    scaling: PixelScaling
    resample: Image.Resampling
    samples_frames: bool = False
    """Whether frames are sampled from a video of which all frames were decoded."""
    is_requested: bool = False
    """Whether the request sets sampling options. They then also apply to videos of which frames were sampled
    in decoding."""
    fps: float | None = None
    """Number of frames per second of video to sample; None if `num_frames` or no rate is set."""
    num_frames: int | None = None
    """Total number of frames to sample from a video; None if it follows from `fps`."""
    min_frames: int = 4
    max_frames: int = 768
    """Maximum number of frames; 1 for images."""
    max_seconds: int = 300
    """Length of a video in seconds, beyond which frames are sampled less often."""

    @property
    def unit(self) -> int:
        """Number of pixels of which the height and width of a resized image are multiples."""
        return self.patch * self.merge

    def size_of(self, height: int, width: int, num_frames: int = 0) -> tuple[int, int]:
        """Return the (height, width) in pixels to which an image, or each of `num_frames` frames of a video,
        is resized. Raise a RequestError if it is too narrow."""
        unit, frames = self.unit, (num_frames or self.frames) if self.counts_frames else 1
        if self.counts_frames and min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        if self.enlarges_sides and height < unit:
            height, width = unit, round(width * unit / height)
        if self.enlarges_sides and width < unit:
            height, width = round(height * unit / width), unit
        if max(height, width) > _MAX_UNEQUAL * min(height, width):
            raise RequestError(
                f"an image of {width} x {height} pixels is too narrow: its longer side may be at most "
                f"{_MAX_UNEQUAL} times the shorter one"
            )
        steps = round(frames / self.frames) * self.frames if self.counts_frames else 1
        rows, columns = round(height / unit), round(width / unit)
        pixels = steps * rows * columns * unit * unit
        if pixels > self.most:
            shrink = math.sqrt(frames * height * width / self.most)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif pixels < self.least:
            grow = math.sqrt(self.least / (frames * height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        return rows * unit, columns * unit

    def max_vectors(self) -> int:
        """Return the number of embeddings of the largest possible image or video. It may exceed that of
        `most` pixels, since the sides of narrow items are at least `unit` pixels long."""
        frames = self.frames if self.counts_frames else 1
        least, most = (-(-pixels // (frames * self.unit**2)) for pixels in (self.least, self.most))
        grown = least + math.isqrt(least * _MAX_UNEQUAL) + math.isqrt(least // _MAX_UNEQUAL) + 3
        steps = 1 if self.counts_frames else -(-self.max_frames // self.frames)
        return max(most, grown, _MAX_UNEQUAL) * steps

    def with_arguments(self, arguments: Mapping[str, Any]) -> "GridSettings":
        changes: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in _ARGUMENTS:
                raise RequestError(
                    f"the processor of this model has no argument {name!r}; known: {', '.join(_ARGUMENTS)}"
                    f"{nearest(name, _ARGUMENTS)}",
                    f"mm_processor_kwargs.{name}",
                )
            changes |= _ARGUMENTS[name](name, value)
        settings = replace(self, **changes)
        self._check(settings.least, settings.most)
        return settings

    def _check(self, least: int, most: int) -> None:
        """Raise a RequestError for more pixels than memory was reserved for, or for enlarging small items too
        much."""
        wrong = ""
        if most > self.most:
            wrong = f"max_pixels is {most}, but this model's files allow {self.most} at most"
        elif least > most:
            wrong = f"min_pixels is {least}, more than max_pixels, {most}"
        elif least > max(self.least, _MAX_GROWN):
            wrong = f"min_pixels is {least}, but an item may be enlarged to {_MAX_GROWN} at most"
        if wrong:
            raise RequestError(wrong, "mm_processor_kwargs")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _LARGEST


Reads = Callable[[str, Any], dict[str, Any]]
"""Function from the name and value of an mm_processor_kwargs argument to the settings that it changes."""


def _wrong(name: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{name} is {value!r:.80}, expected {expected}", f"mm_processor_kwargs.{name}")


def _whole(field: str) -> Reads:
    def read(name: str, value: Any) -> dict[str, Any]:
        if not _is_number(value) or int(value) != value:
            raise _wrong(name, value, "a positive integer")
        return {field: int(value)}

    return read


def _rate(name: str, value: Any) -> dict[str, Any]:
    if not _is_number(value) or value > _MAX_FPS:
        raise _wrong(name, value, f"a positive number, {_MAX_FPS} at most")
    return {"fps": float(value), "num_frames": None, "samples_frames": True, "is_requested": True}


def _count(name: str, value: Any) -> dict[str, Any]:
    return _whole("num_frames")(name, value) | {"fps": None, "samples_frames": True, "is_requested": True}


def _flag(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return {"samples_frames": value, "is_requested": value}


def _size(name: str, value: Any) -> dict[str, Any]:
    known = {"shortest_edge": "least", "longest_edge": "most", "min_pixels": "least", "max_pixels": "most"}
    if not isinstance(value, dict) or not value or not {*value} <= {*known}:
        raise _wrong(name, value, "an object with shortest_edge and longest_edge, both in pixels")
    changes: dict[str, Any] = {}
    for key, number in value.items():
        changes |= _whole(known[key])(f"{name}.{key}", number)
    return changes


_ARGUMENTS: dict[str, Reads] = {
    "min_pixels": _whole("least"),
    "max_pixels": _whole("most"),
    "size": _size,
    "fps": _rate,
    "num_frames": _count,
    "min_frames": _whole("min_frames"),
    "max_frames": _whole("max_frames"),
    "do_sample_frames": _flag,
}
_PIXELS = {
    ("qwen2_vl", "image"): (56 * 56, 28 * 28 * 1280),
    ("qwen2_vl", "video"): (128 * 28 * 28, 28 * 28 * 768),
    ("paddleocr_vl", "image"): (384 * 384, 1536 * 1536),
    ("lfm3_vl", "video"): (128 * 32 * 32, 32 * 32 * 768),
    ("qwen3_vl", "video"): (128 * 32 * 32, 32 * 32 * 768),
    ("glm4v", "image"): (112 * 112, 28 * 28 * 15000),
    ("glm4v", "video"): (112 * 112, 28 * 28 * 2 * 30000),
}
"""Default minimum and maximum of pixels by family and modality; other families use those of Qwen2-VL."""


def read_settings(path: Path, facts: MediaFacts) -> dict[str, GridSettings]:
    """Read the settings of each modality from processor_config.json or the preprocessor files."""
    images = stored_settings(path)
    videos = video_settings(path, stored_settings(path, "video_processor"))
    return {
        "image": replace(_read(images, facts, "image"), samples_frames=False, max_frames=1),
        "video": _read(videos, facts, "video"),
    }


def _read(keys: ConfigReader, facts: MediaFacts, modality: str) -> GridSettings:
    tower: GridFacts = facts.tower
    default = _PIXELS.get((facts.family, modality)) or _PIXELS["qwen2_vl", modality]
    size = ConfigReader(f"{keys.source}, size", keys.get("size") or {})
    least = size.size("shortest_edge", size.size("min_pixels", default[0]))
    most = size.size("longest_edge", size.size("max_pixels", default[1]))
    is_timed = modality == "video" and bool(tower.times)
    is_half = facts.family in ("lfm3_vl", "qwen3_vl") and modality == "video"
    mean, std = (HALF, HALF) if is_half else (CLIP_MEAN, CLIP_STD)
    return GridSettings(
        patch=keys.size("patch_size", tower.patch),
        frames=keys.size("temporal_patch_size", tower.frames),
        merge=keys.size("merge_size", tower.merge),
        least=keys.size("min_pixels", least),
        most=keys.size("max_pixels", most),
        counts_frames=facts.family == "glm4v" or is_timed,
        enlarges_sides=facts.family == "paddleocr_vl",
        scaling=PixelScaling.read(keys, mean, std),
        resample=resample_of(keys, Image.Resampling.BICUBIC),
        samples_frames=keys.flag("do_sample_frames", is_timed),
        fps=keys.optional_number("fps") or (2.0 if is_timed else None),
        num_frames=None if is_timed or not keys.get("num_frames") else keys.size("num_frames"),
        min_frames=keys.size("min_frames", 4),
        max_frames=keys.size("max_frames", 768),
        max_seconds=keys.size("max_duration", 300),
    )
