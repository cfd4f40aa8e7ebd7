"""What a checkpoint says of how images and videos become patches of a grid, and what a request may say."""

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

_MOST_UNEQUAL = 200
"""How many times longer than the other a side may be."""
_MOST_GROWN = 1 << 20
"""Pixels that a small image, or each frame, may be asked to become."""
_MOST_FPS = 1000
_LARGEST = 1 << 63
"""Beyond it there are no arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSettings:
    """How one modality is processed."""

    patch: int
    frames: int
    """That a patch spans."""
    merge: int
    least: int
    """Pixels; fewer are made more."""
    most: int
    counts_frames: bool = False
    """Whether those are of all frames together."""
    lifts: bool = False
    """Whether a side that is less than a unit becomes one, and the other as much longer."""
    finish: PixelScaling
    resample: Image.Resampling
    samples: bool = False
    """Whether some frames are picked of a video that has all of its own;"""
    asked: bool = False
    """also of one from which some have been picked."""
    fps: float | None = None
    """So many in a second are picked."""
    num_frames: int | None = None
    """So many in all."""
    min_frames: int = 4
    max_frames: int = 768
    """1 of an image."""
    max_seconds: int = 300
    """Of longer videos frames are picked less often."""

    @property
    def unit(self) -> int:
        """Both sides are multiples of so many pixels."""
        return self.patch * self.merge

    def size_of(self, height: int, width: int, num_frames: int = 0) -> tuple[int, int]:
        """Height and width that an image, or each frame, is resized to."""
        unit, frames = self.unit, (num_frames or self.frames) if self.counts_frames else 1
        if self.counts_frames and min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        if self.lifts and height < unit:
            height, width = unit, round(width * unit / height)
        if self.lifts and width < unit:
            height, width = round(height * unit / width), unit
        if max(height, width) > _MOST_UNEQUAL * min(height, width):
            raise RequestError(
                f"an image of {width} x {height} pixels is too narrow: its longer side may be at most "
                f"{_MOST_UNEQUAL} times the shorter one"
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

    def most_vectors(self) -> int:
        """Of the largest item. Narrow ones may have more pixels than `most`: no side is less than a unit."""
        frames = self.frames if self.counts_frames else 1
        least, most = (-(-pixels // (frames * self.unit**2)) for pixels in (self.least, self.most))
        grown = least + math.isqrt(least * _MOST_UNEQUAL) + math.isqrt(least // _MOST_UNEQUAL) + 3
        steps = 1 if self.counts_frames else -(-self.max_frames // self.frames)
        return max(most, grown, _MOST_UNEQUAL) * steps

    def with_arguments(self, arguments: Mapping[str, Any]) -> "GridSettings":
        """With what a request says: `mm_processor_kwargs`."""
        changes: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in _ARGUMENTS:
                raise RequestError(
                    f"the processor of this model does not know {name!r}; known: {', '.join(_ARGUMENTS)}"
                    f"{nearest(name, _ARGUMENTS)}",
                    f"mm_processor_kwargs.{name}",
                )
            changes |= _ARGUMENTS[name](name, value)
        settings = replace(self, **changes)
        self._check(settings.least, settings.most)
        return settings

    def _check(self, least: int, most: int) -> None:
        """Nobody may ask for more than memory was set aside for, nor for much of what has little in it."""
        wrong = ""
        if most > self.most:
            wrong = f"max_pixels is {most}, but this model's files allow for {self.most} at most"
        elif least > most:
            wrong = f"min_pixels is {least}, more than max_pixels, {most}"
        elif least > max(self.least, _MOST_GROWN):
            wrong = f"min_pixels is {least}, but an item may be enlarged to {_MOST_GROWN} at most"
        if wrong:
            raise RequestError(wrong, "mm_processor_kwargs")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _LARGEST


Reads = Callable[[str, Any], dict[str, Any]]
"""An argument by name and value -> the settings that it changes."""


def _whole(field: str) -> Reads:
    def read(name: str, value: Any) -> dict[str, Any]:
        if not _is_number(value) or int(value) != value:
            raise RequestError(
                f"{name} is {value!r:.80}, expected a positive integer", f"mm_processor_kwargs.{name}"
            )
        return {field: int(value)}

    return read


def _rate(name: str, value: Any) -> dict[str, Any]:
    if not _is_number(value) or value > _MOST_FPS:
        raise RequestError(
            f"{name} is {value!r:.80}, expected a positive number, {_MOST_FPS} at most",
            f"mm_processor_kwargs.{name}",
        )
    return {"fps": float(value), "num_frames": None, "samples": True, "asked": True}


def _count(name: str, value: Any) -> dict[str, Any]:
    return _whole("num_frames")(name, value) | {"fps": None, "samples": True, "asked": True}


def _flag(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}, expected true or false", f"mm_processor_kwargs.{name}")
    return {"samples": value, "asked": value}


def _size(name: str, value: Any) -> dict[str, Any]:
    known = {"shortest_edge": "least", "longest_edge": "most", "min_pixels": "least", "max_pixels": "most"}
    if not isinstance(value, dict) or not value or not {*value} <= {*known}:
        raise RequestError(
            f"{name} is {value!r}, expected an object with shortest_edge and longest_edge, both in pixels",
            f"mm_processor_kwargs.{name}",
        )
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
    ("qwen3_vl", "video"): (128 * 32 * 32, 32 * 32 * 768),
    ("glm4v", "image"): (112 * 112, 28 * 28 * 15000),
    ("glm4v", "video"): (112 * 112, 28 * 28 * 2 * 30000),
}
"""The least and the most, where a checkpoint says nothing; Qwen2-VL's for those that are not here."""


def read_settings(path: Path, facts: MediaFacts) -> dict[str, GridSettings]:
    """By modality: processor_config.json, or preprocessor_config.json and that of videos."""
    images = stored_settings(path)
    videos = video_settings(path, stored_settings(path, "video_processor"))
    return {
        "image": replace(_read(images, facts, "image"), samples=False, max_frames=1),
        "video": _read(videos, facts, "video"),
    }


def _read(keys: ConfigReader, facts: MediaFacts, modality: str) -> GridSettings:
    tower: GridFacts = facts.tower
    default = _PIXELS.get((facts.family, modality)) or _PIXELS["qwen2_vl", modality]
    size = ConfigReader(f"{keys.source}, size", keys.get("size") or {})
    least = size.size("shortest_edge", size.size("min_pixels", default[0]))
    most = size.size("longest_edge", size.size("max_pixels", default[1]))
    is_timed = modality == "video" and bool(tower.times)
    is_half = facts.family == "qwen3_vl" and modality == "video"
    return GridSettings(
        patch=keys.size("patch_size", tower.patch),
        frames=keys.size("temporal_patch_size", tower.frames),
        merge=keys.size("merge_size", tower.merge),
        least=keys.size("min_pixels", least),
        most=keys.size("max_pixels", most),
        counts_frames=facts.family == "glm4v" or is_timed,
        lifts=facts.family == "paddleocr_vl",
        finish=PixelScaling.read(keys, HALF, HALF)
        if is_half
        else PixelScaling.read(keys, CLIP_MEAN, CLIP_STD),
        resample=resample_of(keys, Image.Resampling.BICUBIC),
        samples=keys.flag("do_sample_frames", is_timed),
        fps=keys.optional_number("fps") or (2.0 if is_timed else None),
        num_frames=None if is_timed or not keys.get("num_frames") else keys.size("num_frames"),
        min_frames=keys.size("min_frames", 4),
        max_frames=keys.size("max_frames", 768),
        max_seconds=keys.size("max_duration", 300),
    )
