"""Pictures, videos and sounds under the names of `vllm.assets`. They are generated: nothing is downloaded."""

import math
import zlib
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

_SIZE = 336
_RATE = 16_000
_SECONDS = 4


class ImageAsset:
    """A generated picture; its name decides on its colours."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def pil_image(self) -> Image.Image:
        return Image.fromarray(_frame(self.name, 0.0))

    def pil_image_ext(self, ext: str = "jpg") -> Image.Image:
        """Return the picture. `ext`, in vLLM the extension of a file to read, has no effect."""
        return self.pil_image


class VideoAsset:
    """A generated video of `num_frames` frames at one frame per second."""

    def __init__(self, name: str, num_frames: int = 16) -> None:
        self.name, self.num_frames = name, max(num_frames, 1)

    @cached_property
    def np_ndarrays(self) -> np.ndarray[Any, Any]:
        """Return the frames as one RGB array [frames, height, width, 3] of uint8."""
        return np.stack([_frame(self.name, at / self.num_frames) for at in range(self.num_frames)])

    @property
    def pil_images(self) -> list[Image.Image]:
        return [Image.fromarray(frame) for frame in self.np_ndarrays]

    @property
    def metadata(self) -> dict[str, Any]:
        return {
            "total_num_frames": self.num_frames,
            "fps": 1.0,
            "duration": float(self.num_frames),
            "video_backend": "generated",
            "frames_indices": list(range(self.num_frames)),
            "do_sample_frames": False,
        }

    def get_audio(self, sampling_rate: float | None = None) -> np.ndarray[Any, Any]:
        """Return a generated sound track of four seconds, as float32 samples; 16 kHz by default."""
        return _tone(self.name, int(sampling_rate or _RATE))


class AudioAsset:
    """A generated sound of four seconds at 16 kHz."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def audio_and_sample_rate(self) -> tuple[np.ndarray[Any, Any], int]:
        return _tone(self.name, _RATE), _RATE


def _frame(name: str, time: float) -> np.ndarray[Any, Any]:
    """Return an RGB picture [height, width, 3]: a colour gradient with a disc, which moves from left to right
    as `time` goes from 0 to 1."""
    colours = np.random.default_rng(zlib.crc32(name.encode())).integers(32, 224, (3, 3))
    y, x = np.mgrid[0:_SIZE, 0:_SIZE] / _SIZE
    picture = colours[0] * x[..., None] + colours[1] * (1 - x[..., None])
    inside = (x - 0.25 - 0.5 * time) ** 2 + (y - 0.5) ** 2 < 0.04
    picture[inside] = colours[2]
    return np.asarray(picture, dtype=np.uint8)


def _tone(name: str, rate: int) -> np.ndarray[Any, Any]:
    """Return the samples of a tone that swells and fades, `rate` per second; `name` decides on its pitch."""
    pitch = 220 + zlib.crc32(name.encode()) % 440
    times = np.arange(_SECONDS * rate) / rate
    return (0.3 * np.sin(2 * math.pi * pitch * times) * np.sin(math.pi * times / _SECONDS)).astype(np.float32)
