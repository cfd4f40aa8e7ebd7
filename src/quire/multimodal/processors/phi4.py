"""Phi-4-multimodal: an image in tiles that it fills from the top left, and as a whole; and audio, 12.5 tokens
a second."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.phi4 import Phi4Facts
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array
from quire.errors import RequestError
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    PixelScaling,
    Size,
    count_of,
    stored_settings,
    tiled,
)
from quire.multimodal.mel import Samples
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.multimodal.processors.audio_base import read_samples
from quire.multimodal.processors.image_base import ImageProcessor
from quire.multimodal.processors.tiling import nearest_grid
from quire.text.tokenizer import Tokenizer

_NUMBERED = re.compile(r"<\|(image|audio)_\d+\|>")
"""Placeholders of the published chat format."""
_SHORTEST = 10
"""Smallest side in pixels of the part of the tiles that an image fills."""
_MAX_SECONDS = 1800
_RATE, _FFT, _FRAME, _HOP = 16000, 512, 400, 160
_EMPHASIS, _TOP_HERTZ = 0.97, 7690.0
_AUDIO_ARGUMENTS = ("truncation", "audio_projection_mode")


class Phi4Processor(ImageProcessor):
    """Processor of Phi-4-multimodal."""

    arguments = (*IMAGE_ARGUMENTS, "dynamic_hd")
    mean = std = HALF
    resample = Image.Resampling.BILINEAR
    facts: Phi4Facts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer)
        side = self.facts.vit.image
        self.settings = self.settings.defaults(size={"height": side, "width": side})
        self.check_square(self.settings)
        self.settings = self.settings.but(resample=None)  # the stored filter is that of the whole image
        self.audio_settings = stored_settings(path, "audio_processor")
        self.audio_settings.require("sampling_rate", _RATE)

    def marks(self, modality: str) -> list[int]:
        return [self.facts.audio_id if modality == "audio" else self.mark]

    def text(self, modality: str, number: int) -> str:
        return self.tokenizer.backend.id_to_token(self.marks(modality)[0]) or ""

    def rewrite_text(self, text: str) -> str:
        return _NUMBERED.sub(lambda match: self.text(match[1], 0), text)

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        visual = {name: value for name, value in arguments.items() if name not in _AUDIO_ARGUMENTS}
        if not isinstance(content, Audio):
            return super().process(modality, content, visual)
        self.read_arguments("image", visual)
        mode = arguments.get("audio_projection_mode", "speech")
        if mode not in ("speech", "vision"):
            raise RequestError(
                f"audio_projection_mode is {mode!r}, expected 'speech', or 'vision' beside images",
                "mm_processor_kwargs",
            )
        truncation = {name: value for name, value in arguments.items() if name == "truncation"}
        (longest,) = self.largest("audio")
        samples = read_samples(
            content, self.audio_settings, truncation, rate=_RATE, longest=longest, fewest=_FRAME
        )
        mel = log_mel(samples, self.facts.sound.mels)
        arrays = {"mel": Array.of(mel)}
        if mode == "vision":
            arrays["beside_image"] = Array.of(np.ones(1, np.float32))
        return ProcessedItem([self.facts.audio_id] * self._num_states(len(mel)), arrays=arrays)

    def _num_states(self, frames: int) -> int:
        """Return the number of embeddings of audio with this number of spectrogram frames."""
        factor: int = 2**self.facts.sound.halvings
        return -(-frames // factor)

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        vit = self.facts.vit
        rows, columns = self._grid(image.size[::-1], keys)
        high, wide = rows * vit.image, columns * vit.image
        down, along = high / image.height, wide / image.width
        size = (int(image.height * along), wide) if along < down else (high, int(image.width * down))
        if min(size) < _SHORTEST:
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels is resized to {size[1]} x {size[0]}, and "
                f"{_SHORTEST} x {_SHORTEST} are the minimum"
            )
        pixels = np.full((high, wide, 3), 255, np.uint8)
        pixels[: size[0], : size[1]] = self.resize(image, size, keys)
        filled = (
            rows * vit.side - (high - size[0]) // vit.patch,
            columns * vit.side - (wide - size[1]) // vit.patch,
        )
        tiles = tiled(pixels, (vit.image, vit.image)).reshape(rows, columns, vit.image, vit.image, 3)
        scale, shift = (scaling.normalized(np.full((1, 1, 3), value, np.uint8)) for value in (1, 0))
        whole = bicubic(pixels, vit.image).transpose(2, 0, 1) * (scale - shift) + shift
        arrays = scaling(tiles) | {
            "whole": Array.of(whole.astype(np.float32)),
            "filled": Array.of(np.array(filled, np.int32)),
        }
        return ProcessedItem([self.image_id] * self._count(filled), arrays=arrays)

    def _grid(self, image: Size, keys: ConfigReader) -> Size:
        """Return the rows and columns of the tiles of an image."""
        side, most = self.facts.vit.image, count_of(keys, "dynamic_hd", 36)
        rows, columns = (math.ceil(length / side) for length in image)
        return nearest_grid(image, side, 1, most) if rows * columns > most else (rows, columns)

    def _count(self, filled: Size) -> int:
        """Return the number of embeddings of an image that fills these rows and columns of patches."""
        side, (rows, columns) = self.facts.side, (-(-length // 2) for length in filled)
        return rows * (columns + 1) + 1 + side * (side + 1)

    def max_vectors(self, modality: str) -> int:
        if modality == "audio":
            (longest,) = self.largest(modality)
            return self._num_states((longest - _FRAME) // _HOP + 1)
        side, most = self.facts.vit.side, count_of(self.settings, "dynamic_hd", 36)
        return self._count((most * side, side))

    def largest(self, modality: str) -> tuple[int, ...]:
        """Return the length of the longest audio, or the size of an image with all tiles in one column."""
        if modality == "audio":
            return (_MAX_SECONDS * _RATE,)
        side = self.facts.vit.image
        return side, side * count_of(self.settings, "dynamic_hd", 36)


def bicubic(pixels: NDArray[np.uint8], side: int) -> NDArray[np.float32]:
    """Resize an image [height, width, channels] to a square, by cubic interpolation of the 16 pixels around
    each point, as `torch.nn.functional.interpolate` does."""
    x = pixels.astype(np.float32)
    for axis in (0, 1):
        places, weights = _cubic_taps(x.shape[axis], side)
        shape = (side, 1, 1) if axis == 0 else (1, side, 1)
        taps = [x.take(places[:, tap], axis) * weights[:, tap].reshape(shape) for tap in range(4)]
        x = taps[0] + taps[1] + taps[2] + taps[3]
    return x


def _cubic_taps(length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the indices and the weights of the four pixels around each of `side` points of a line, [side,
    4] each."""
    at = (np.arange(side) + 0.5) * (length / side) - 0.5
    first = np.floor(at)
    away = np.abs(at[:, None] - first[:, None] - np.arange(-1, 3))
    near, far = ((1.25 * away - 2.25) * away) * away + 1, ((-0.75 * away + 3.75) * away - 6) * away + 3
    places = np.clip(first[:, None] + np.arange(-1, 3), 0, length - 1).astype(np.int64)
    return places, np.where(away <= 1, near, far).astype(np.float32)


def log_mel(samples: Samples, mels: int) -> NDArray[np.float32]:
    """Return the log-mel spectrogram, [frames, mels], with pre-emphasis within each frame."""
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float32), _FRAME)[::_HOP]
    previous = np.concatenate((frames[:, 1:2], frames[:, :-1]), 1)
    previous[:, 0] = frames[:, 0]
    emphasized = (frames - np.float32(_EMPHASIS) * previous) * np.float32(32768)
    power = np.abs(np.fft.rfft(np.hamming(_FRAME) * emphasized, n=_FFT).astype(np.complex64)) ** 2
    return np.log(np.maximum(power @ _filters(mels), np.float32(1)))


@lru_cache
def _filters(mels: int) -> NDArray[np.float32]:
    """Return the mel filter bank, [frequencies, mels]: triangles that are evenly spaced and straight in
    mels."""
    places = 1127.0 * np.log(1 + np.arange(_FFT // 2 + 1) * (_RATE / _FFT) / 700.0)
    corners = np.linspace(0, 1127.0 * np.log(1 + _TOP_HERTZ / 700.0), mels + 2)
    away, widths = corners[None] - places[:, None], np.diff(corners)
    slopes = np.minimum(-away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:])
    filters: NDArray[np.float32] = np.maximum(0, slopes).astype(np.float32)
    return filters
