"""A grid of patches: how pixels are laid out in it, which frames are in it, where its tokens stand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.data.multimodal import MediaItem
from quire.errors import RequestError
from quire.multimodal.processors import Video
from quire.multimodal.processors.grid_settings import GridSettings

USUAL_FPS = 24.0
"""Of a video of which nobody said it, as in transformers."""


class PatchLayout(NamedTuple):
    """Patches in time, height and width."""

    steps: int
    height: int
    width: int

    def num_vectors(self, merge: int) -> int:
        return self.steps * (self.height // merge) * (self.width // merge)


def patches_of(frames: NDArray[np.uint8], settings: GridSettings) -> NDArray[np.uint8]:
    """[frames, height, width, 3] -> [steps, height, width, 3, frames of a step * patch, patch], counted in
    patches.

    They lie square by square of those that become one vector, and the numbers of a patch colour by colour,
    frame by frame. What lacks to a whole step repeats the last frame; an image is left alone in its step.
    """
    count, height, width, _ = frames.shape
    size, merge, depth = settings.patch, settings.merge, settings.frames
    depth = min(depth, count)
    rows, columns, steps = height // size, width // size, -(-count // depth)
    pixels = np.stack([frames[..., i] for i in range(3)], axis=1)
    pixels = pixels.reshape(count, 3, rows // merge, merge, size, columns // merge, merge, size)
    # [steps, squares down, squares across, down and across in the square, colour, frame, down, across]
    shape = steps, rows // merge, columns // merge, merge, merge, 3, depth, size, size
    out = np.empty(shape, dtype=np.uint8)
    for at in range(steps * depth):
        frame = pixels[min(at, count - 1)]
        out[at // depth, ..., at % depth, :, :] = frame.transpose(1, 4, 2, 5, 0, 3, 6)
    return out.reshape(steps, rows, columns, 3, depth * size, size)


def sampled(video: Video, settings: GridSettings, times: str) -> tuple[list[int], list[int], float | None]:
    """Which of the frames are taken; which of the whole video these are; how many of those a second has."""
    count = len(video.frames)
    total = max(video.total_frames, count)
    indices = list(video.indices) or [int(i) for i in np.linspace(0, total - 1, count).round()]
    if len(indices) != count or not count:
        raise RequestError(f"a video has {count} frames, of which {len(indices)} are numbered")
    fps = video.source_fps or (video.fps and video.fps * total / count)
    if not settings.samples or (video.indices and not settings.asked):
        return list(range(count)), indices, fps
    chosen_frames = _PICKS[times](count, video.fps or USUAL_FPS, settings)
    return chosen_frames, [indices[i] for i in chosen_frames], fps


def _evenly(count: int, fps: float, settings: GridSettings) -> list[int]:
    """Qwen2-VL's: a whole number of steps."""
    depth = settings.frames
    wanted: float
    if settings.num_frames is not None:
        wanted = round(settings.num_frames / depth) * depth
    elif settings.fps is not None:
        most = math.floor(min(settings.max_frames, count) / depth) * depth
        wanted = min(max(count / fps * settings.fps, settings.min_frames), most, count)
        wanted = math.floor(wanted / depth) * depth
    else:
        return list(range(count))
    wanted = min(max(wanted, 1), count)
    chosen_frames: list[int] = np.arange(0, count, count / wanted).astype(np.float32).astype(int).tolist()
    return chosen_frames


def _spaced(count: int, fps: float, settings: GridSettings) -> list[int]:
    """Qwen3-VL's: the first and the last, and what lies evenly between."""
    wanted = settings.num_frames
    if wanted is None and settings.fps is not None:
        wanted = min(max(int(count / fps * settings.fps), settings.min_frames), settings.max_frames)
    wanted = min(wanted or max(count, settings.min_frames), settings.max_frames, count)
    return [int(i) for i in np.linspace(0, count - 1, wanted).round()]


def _by_second(count: int, fps: float, settings: GridSettings) -> list[int]:
    """GLM's: the first frame at or behind each time, an even number of them."""
    last, rate = count - 1, settings.fps or 2.0
    seconds = round(last / fps) + 1
    if seconds <= settings.max_seconds:
        times = [i / rate for i in range(max(math.floor(seconds * rate), 1))]
        chosen_frames = [min(last, math.ceil(i * fps / rate)) for i in range(len(times))]
    else:
        wanted = int(settings.max_seconds * rate)
        chosen_frames = [min(last, math.ceil(t * fps)) for t in np.linspace(0, seconds, wanted)]
        chosen_frames = list(range(count)) if wanted >= count else chosen_frames
    return _even(chosen_frames)


def _even(chosen_frames: list[int]) -> list[int]:
    """Each once, and an even number of them."""
    chosen_frames = list(dict.fromkeys(chosen_frames))
    return chosen_frames if len(chosen_frames) % 2 == 0 else [*chosen_frames, chosen_frames[-1]]


def _by_length(count: int, fps: float, settings: GridSettings) -> list[int]:
    """GLM-4.6V's: the longer the video, the fewer of a second."""
    last, depth = count - 1, settings.frames
    seconds = round(last / fps) + 1
    rate = next((rate for most, rate in _RATES if seconds <= most), _RATES[-1][1])
    wanted = min(int(min(seconds, _RATES[-1][0]) * rate * depth), _MOST_FRAMES)
    chosen_frames: list[int] = []
    if count >= wanted:
        time = 0.0
        for frame in range(count):
            if frame * (1 / fps) >= time and (not chosen_frames or time < int(seconds)):
                chosen_frames.append(frame)
                time += 1 / (depth * rate)
    if len(chosen_frames) != wanted:
        first, end = (chosen_frames[0], chosen_frames[-1]) if 0 < len(chosen_frames) < wanted else (0, last)
        chosen_frames = np.linspace(first, end, wanted, dtype=int).tolist()
    return _even(chosen_frames)


_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Up to so many seconds: steps of a second."""
_MOST_FRAMES = 640
_PICKS = {"": _evenly, "before": _spaced, "behind": _by_second, "seconds": _by_length}
"""By how frames are told apart."""


def positions_of(
    num_tokens: int,
    items: Sequence[MediaItem],
    facts: Sequence[Mapping[str, Any]],
    merge: int,
    *,
    has_time: bool = False,
) -> NDArray[np.int32]:
    """[3, num_tokens]: text goes on by one in all three; the tokens of a grid by time, height and width, and
    what follows by the longer side of the grid, or by its time, if that counts and is longer."""
    out = np.empty((3, num_tokens), np.int32)
    done = at = 0
    for item, known in zip(items, facts, strict=True):
        grid = PatchLayout(*known["grid"])
        rows, columns = grid.height // merge, grid.width // merge
        places = item.places()
        steps = grid.steps // len(places)
        time = (np.arange(steps, dtype=np.float32) * np.float32(known.get("step", 1.0))).astype(np.int32)
        axes = np.meshgrid(time, np.arange(rows), np.arange(columns), indexing="ij")
        cells = np.stack(axes).reshape(3, -1)
        for first, count in places:
            out[:, done:first] = at + np.arange(first - done)
            at += first - done
            out[:, first : first + count] = at + cells
            at += max(rows, columns, int(time[-1]) + 1 if has_time else 0)
            done = first + count
    out[:, done:] = at + np.arange(num_tokens - done)
    return out
