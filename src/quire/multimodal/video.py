"""Decoding of video files to a number of evenly spaced frames."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.multimodal import pyav
from quire.multimodal.fetch import Blob
from quire.multimodal.gif import count_frames
from quire.multimodal.image_files import opened, to_rgb
from quire.multimodal.limits import DecodeLimits
from quire.multimodal.processors import Video

_NUM_FRAMES = 32
_MAX_FRAMES = 100_000
"""Maximum number of frames of a video file; longer files are refused. All frames up to the last sampled one
are decoded."""
_DECODE_S = 60.0
_MAX_SAMPLED = 2
"""Maximum number of pixels of all sampled frames together, as a multiple of the limit of one image."""
_MAX_ANIMATED = 4
"""Maximum number of pixels of all frames of an animated image, as a multiple of the limit of one image."""
_CODEC_BYTES = 24
"""Bytes that a codec uses per pixel of a frame: up to 16 reference frames with 1.5 bytes per pixel."""
_PICTURE_BYTES = 20
"""Bytes per pixel to decode an animated image: for the canvas, the next frame, and that frame as RGB."""


def decode_video(blob: Blob, options: Mapping[str, Any], limits: DecodeLimits) -> Video:
    """Decode a video: with Pillow if it is an animated image or consists of images, else with PyAV."""
    data = blob.parts[0]
    if blob.media_type == "video/jpeg" or len(blob.parts) > 1:
        return _decode_frames(blob.parts, options, limits)
    if data.startswith((b"GIF8", b"\x89PNG")) or data[8:12] in (b"WEBP", b"avis", b"avif"):
        return _decode_animation(data, options, limits)
    return _decode_file(data, options, limits)


def sample_indices(total: int, fps: float | None, options: Mapping[str, Any]) -> list[int]:
    """Return the indices of the evenly spaced frames to sample from `total` frames at `fps` frames per
    second. The options are `num_frames` (-1: all) and `fps`, the maximum number of frames per second."""
    count, wanted = options.get("num_frames", _NUM_FRAMES), options.get("fps")
    if type(count) is not int or (count < 1 and count != -1):
        raise _wrong("num_frames", "a positive integer, or -1 for all", count)
    if wanted is not None and (not isinstance(wanted, int | float) or isinstance(wanted, bool)):
        raise _wrong("fps", "a number", wanted)
    count = total if count == -1 else min(count, total)
    if wanted is not None and wanted > 0 and fps:
        count = min(count, max(int(total / fps * wanted), 1))
    indices: list[int] = np.linspace(0, total - 1, count).astype(int).tolist()
    return indices


def _wrong(name: str, what: str, value: Any) -> RequestError:
    return RequestError(f"media_io_kwargs: video.{name} must be {what}, not {value!r:.40}", "media_io_kwargs")


def _decode_frames(parts: Sequence[bytes], options: Mapping[str, Any], limits: DecodeLimits) -> Video:
    """Decode a video that was sent as images: all of them, unless the option `num_frames` is set."""
    indices = sample_indices(len(parts), None, {"num_frames": -1, **options})
    frames: _Frames | None = None
    for index in indices:
        with opened(parts[index], limits) as image:
            if frames is None:
                frames = _Frames(indices, image.size, None, len(parts), limits, _PICTURE_BYTES)
            if image.size != frames.size:
                raise RequestError("its frames have different sizes")
            frames.add(np.asarray(to_rgb(image)))
    assert frames is not None
    return frames.video()


def _decode_animation(data: bytes, options: Mapping[str, Any], limits: DecodeLimits) -> Video:
    with opened(data, limits) as image:
        total = count_frames(data) if data.startswith(b"GIF8") else getattr(image, "n_frames", 1)
        limits.check_pixels(*image.size, total, times=_MAX_ANIMATED)
        limits.take(image.width * image.height * _PICTURE_BYTES)
        image.load()  # a frame's duration may only be known with its pixels
        length_ms = image.info.get("duration")
        fps = 1000 / length_ms if length_ms else None
        indices = sample_indices(total, fps, options)
        wanted, size = {*indices}, image.size
        frames = _Frames(indices, size, fps, total, limits)
        end = time.monotonic() + _DECODE_S
        for index in range(total):
            image.seek(index)
            limits.check_pixels(*image.size, total, times=_MAX_ANIMATED)
            _check_time(end)
            if index in wanted:
                frames.add(np.asarray(to_rgb(image.resize(size) if image.size != size else image.copy())))
        return frames.video()


def _decode_file(data: bytes, options: Mapping[str, Any], limits: DecodeLimits) -> Video:
    with pyav.opened(data, "a video") as container:
        if not container.streams.video:
            raise RequestError("the file has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        total = _count(container, stream)
        fps = float(stream.average_rate) if stream.average_rate else None
        indices = sample_indices(total, fps, options)
        largest = _begin_size(0, stream.codec_context.width, stream.codec_context.height, limits)
        container.seek(0, stream=stream)
        wanted, frames = {*indices}, None
        end = time.monotonic() + _DECODE_S
        for index, frame in enumerate(container.decode(stream)):
            _check_time(end)
            largest = _begin_size(largest, frame.width, frame.height, limits)
            if index in wanted:
                size = frame.width, frame.height
                frames = frames or _Frames(indices, size, fps, total, limits)
                if size != frames.size:
                    frame = frame.reformat(width=frames.size[0], height=frames.size[1])
                frames.add(frame.to_ndarray(format="rgb24"))
            if index >= indices[-1]:
                break
        if frames is None:
            raise RequestError("the video has no frames that can be decoded")
        return frames.video()


def _begin_size(largest: int, width: int, height: int, limits: DecodeLimits) -> int:
    """Reserve codec memory for a frame of this size in pixels, as far as it exceeds `largest`, the most
    pixels of a frame so far; frames may be larger than the file's header states. Return the new maximum."""
    if width * height > largest:
        limits.check_pixels(width, height)
        limits.take((width * height - largest) * _CODEC_BYTES)
    return max(width * height, largest)


def _count(container: Any, stream: Any) -> int:
    """Return the number of frames of a video, counted by its packets without decoding: the file's header may
    be wrong. Raise a RequestError for too many."""
    total = 0
    for packet in container.demux(stream):
        total += packet.size > 0
        if total > _MAX_FRAMES:
            raise RequestError(f"the video has more than {_MAX_FRAMES} frames")
    if not total:
        raise RequestError("the video has no frames")
    return total


def _check_time(end: float) -> None:
    if time.monotonic() > end:
        raise RequestError(f"the video takes longer than {_DECODE_S:g} s to decode; send a shorter one")


class _Frames:
    """The sampled frames of a video, in one array."""

    def __init__(
        self,
        indices: Sequence[int],
        size: tuple[int, int],
        fps: float | None,
        total: int,
        limits: DecodeLimits,
        picture_bytes: int = 0,
    ) -> None:
        """Reserve memory for all frames, and `picture_bytes` per pixel of one frame for the decoder. `size`
        is width and height. Raise a RequestError if the frames are too large."""
        limits.check_pixels(*size, len(indices), times=_MAX_SAMPLED)
        self.size, self._indices, self._fps, self._total = size, indices, fps, total
        limits.check(Video.black(len(indices), *size, *self._facts(len(indices))))
        limits.take(size[0] * size[1] * (3 * len(indices) + picture_bytes))
        self._frames = np.empty((len(indices), size[1], size[0], 3), np.uint8)
        self._count = 0

    def _facts(self, count: int) -> tuple[float | None, int, tuple[int, ...], float | None]:
        """Return the fields of `Video` other than `frames`, for a video of the first `count` sampled
        frames."""
        sampled_fps = None if self._fps is None else self._fps * count / self._total
        return sampled_fps, self._total, tuple(self._indices[:count]), self._fps

    def add(self, frame: NDArray[np.uint8]) -> None:
        self._frames[self._count] = frame
        self._count += 1

    def video(self) -> Video:
        return Video(self._frames[: self._count], *self._facts(self._count))
