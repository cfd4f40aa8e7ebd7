"""Grids of patches of images and videos: pixel layout and frame sampling."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.multimodal.processors import Video
from quire.multimodal.processors.grid_settings import GridSettings

USUAL_FPS = 24.0
"""Frames per second that are assumed for a video without metadata, as in transformers."""


class PatchSpans(NamedTuple):
    """Numbers of patches of an image or video in time (steps), height and width."""

    steps: int
    height: int
    width: int

    def num_vectors(self, merge: int) -> int:
        return self.steps * (self.height // merge) * (self.width // merge)


def patches_of(frames: NDArray[np.uint8], settings: GridSettings) -> NDArray[np.uint8]:
    """Cut frames [frames, height, width, 3] into patches [steps, rows, columns, 3, frames per step * patch,
    patch].

    A step has the frames that are in one patch. Patches that the encoder merges into one embedding are
    adjacent. A patch is ordered by colour, then by frame. The last step is filled by repeating the last
    frame; an image is a step of one frame."""
    count, height, width, _ = frames.shape
    size, merge, depth = settings.patch, settings.merge, settings.frames
    depth = min(depth, count)
    rows, columns, steps = height // size, width // size, -(-count // depth)
    pixels = np.stack([frames[..., i] for i in range(3)], axis=1)
    pixels = pixels.reshape(count, 3, rows // merge, merge, size, columns // merge, merge, size)
    # [steps, square rows, square columns, patch rows, patch columns, colour, frame, rows, columns]
    shape = steps, rows // merge, columns // merge, merge, merge, 3, depth, size, size
    out = np.empty(shape, dtype=np.uint8)
    for at in range(steps * depth):
        frame = pixels[min(at, count - 1)]
        out[at // depth, ..., at % depth, :, :] = frame.transpose(1, 4, 2, 5, 0, 3, 6)
    return out.reshape(steps, rows, columns, 3, depth * size, size)


def sample_frames(
    video: Video, settings: GridSettings, times: str
) -> tuple[list[int], list[int], float | None]:
    """Return the indices of the sampled frames in `video`, their indices in the source video, and the frames
    per second of the source video (None: unknown). `times` is `GridFacts.times`, by which the sampling
    function is chosen."""
    count = len(video.frames)
    total = max(video.total_frames, count)
    indices = list(video.indices) or [int(i) for i in np.linspace(0, total - 1, count).round()]
    if len(indices) != count or not count:
        raise RequestError(f"a video has {count} frames and {len(indices)} frame indices")
    fps = video.source_fps or (video.fps and video.fps * total / count)
    if not settings.samples_frames or (video.indices and not settings.is_requested):
        return list(range(count)), indices, fps
    chosen = _SAMPLERS[times](count, video.fps or USUAL_FPS, settings)
    return chosen, [indices[i] for i in chosen], fps


def _evenly(count: int, fps: float, settings: GridSettings) -> list[int]:
    """Return frame indices, sampled as for Qwen2-VL: evenly, and a multiple of the number of frames per
    patch."""
    depth = settings.frames
    num_sampled: float
    if settings.num_frames is not None:
        num_sampled = round(settings.num_frames / depth) * depth
    elif settings.fps is not None:
        most = math.floor(min(settings.max_frames, count) / depth) * depth
        num_sampled = min(max(count / fps * settings.fps, settings.min_frames), most, count)
        num_sampled = math.floor(num_sampled / depth) * depth
    else:
        return list(range(count))
    num_sampled = min(max(num_sampled, 1), count)
    chosen: list[int] = np.arange(0, count, count / num_sampled).astype(np.float32).astype(int).tolist()
    return chosen


def _spaced(count: int, fps: float, settings: GridSettings) -> list[int]:
    """Return frame indices, sampled as for Qwen3-VL: evenly, from the first to the last frame."""
    num_sampled = settings.num_frames
    if num_sampled is None and settings.fps is not None:
        num_sampled = min(max(int(count / fps * settings.fps), settings.min_frames), settings.max_frames)
    num_sampled = min(num_sampled or max(count, settings.min_frames), settings.max_frames, count)
    return [int(i) for i in np.linspace(0, count - 1, num_sampled).round()]


def _by_second(count: int, fps: float, settings: GridSettings) -> list[int]:
    """Return an even number of frame indices, sampled as for GLM-4.1V: the first frame at or after each of
    evenly spaced times."""
    last, rate = count - 1, settings.fps or 2.0
    seconds = round(last / fps) + 1
    if seconds <= settings.max_seconds:
        chosen = [min(last, math.ceil(i * fps / rate)) for i in range(max(math.floor(seconds * rate), 1))]
    else:
        num_sampled = int(settings.max_seconds * rate)
        chosen = [min(last, math.ceil(t * fps)) for t in np.linspace(0, seconds, num_sampled)]
        chosen = list(range(count)) if num_sampled >= count else chosen
    return _even(chosen)


def _even(chosen: list[int]) -> list[int]:
    """Return frame indices without duplicates. If their number is odd, the last one is repeated, since a
    patch has two frames."""
    chosen = list(dict.fromkeys(chosen))
    return chosen if len(chosen) % 2 == 0 else [*chosen, chosen[-1]]


def _by_length(count: int, fps: float, settings: GridSettings) -> list[int]:
    """Return frame indices, sampled as for GLM-4.6V: the longer the video, the fewer frames per second."""
    last, depth = count - 1, settings.frames
    seconds = round(last / fps) + 1
    rate = next((rate for most, rate in _RATES if seconds <= most), _RATES[-1][1])
    num_sampled = min(int(min(seconds, _RATES[-1][0]) * rate * depth), _MAX_FRAMES)
    chosen: list[int] = []
    if count >= num_sampled:
        time = 0.0
        for frame in range(count):
            if frame * (1 / fps) >= time and (not chosen or time < int(seconds)):
                chosen.append(frame)
                time += 1 / (depth * rate)
    if len(chosen) != num_sampled:
        first, end = (chosen[0], chosen[-1]) if 0 < len(chosen) < num_sampled else (0, last)
        chosen = np.linspace(first, end, num_sampled, dtype=int).tolist()
    return _even(chosen)


_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Pairs of a maximum video length in seconds and the number of steps (patches in time) per second to
sample."""
_MAX_FRAMES = 640
_SAMPLERS = {"": _evenly, "before": _spaced, "behind": _by_second, "seconds": _by_length}
"""Sampling functions by `GridFacts.times`, the way in which a model writes the times of frames."""
