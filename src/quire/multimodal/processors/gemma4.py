"""Gemma 4: an image in its own aspect ratio, with at most `max_soft_tokens` image tokens (soft tokens); a
video as frames with timestamps; and 25 tokens for a second of audio."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.gemma4 import Gemma4AudioFacts, Gemma4Facts, Gemma4VisionFacts
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    MAX_FRAMES,
    PixelScaling,
    Size,
    argument_errors,
    check_frames,
    stored_settings,
    video_settings,
)
from quire.multimodal.processors import Audio, Content, ProcessedItem, Video
from quire.multimodal.processors.audio_base import read_samples
from quire.multimodal.processors.grid import USUAL_FPS
from quire.multimodal.processors.image_base import ImageProcessor, read_vectors
from quire.multimodal.usm_mel import USMSpectrogram
from quire.text.tokenizer import Tokenizer

_SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Numbers of soft tokens that the model was trained for."""
_LONGEST = 480000
"""Maximum number of audio samples."""
_AUDIO_SETTINGS: dict[str, Any] = {"frame_length_ms": 20.0, "max_frequency": 8000.0, "mel_floor": 1e-3}
"""Settings of the feature extractor that a checkpoint may leave out."""
_VIDEO_SETTINGS: dict[str, Any] = {"max_soft_tokens": 70, "image_mean": (0.0,) * 3, "image_std": (1.0,) * 3}
"""Settings of the video processor that a checkpoint may leave out."""
_AUDIO_ARGUMENTS = ("truncation",)


class Gemma4Processor(ImageProcessor):
    """Processor of Gemma 4. It resizes an image to whole squares of patches, each of which becomes one of at
    most `max_soft_tokens` image tokens."""

    arguments = (*IMAGE_ARGUMENTS, "max_soft_tokens")
    mean = std = HALF
    facts: Gemma4VisionFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        towers: Gemma4Facts = facts.tower
        super().__init__(path, replace(facts, tower=towers.vision), tokenizer, do_normalize=False)
        self.sound, self.video_id = towers.sound, towers.video_id
        videos = video_settings(path, ConfigReader(self.settings.source, {}))
        self.video_settings = videos.defaults(**_VIDEO_SETTINGS)
        if self.sound is not None:
            mels = self.sound.mels
            self.audio_settings = stored_settings(
                path, "feature_extractor", feature_size=mels, **_AUDIO_SETTINGS
            )
            self.log_mel = USMSpectrogram(self.audio_settings, mels, adds_floor=True)
        known = {"patch_size": self.facts.patch, "pooling_kernel_size": self.facts.merge}
        for key, size in known.items():
            if self.settings.get(key) not in (None, size):
                raise self.settings.wrong(key, f"{size}, as in config.json")
        self.unit = self.facts.patch * self.facts.merge
        self._max_soft_tokens(self.settings)
        self._max_soft_tokens(self.video_settings)

    def marks(self, modality: str) -> list[int]:
        if modality == "audio" and self.sound is not None:
            return [self.sound.audio_id]
        return [self.video_id if modality == "video" else self.mark]

    def text(self, modality: str, number: int) -> str:
        return self.tokenizer.backend.id_to_token(self.marks(modality)[0]) or ""

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        visual = {name: value for name, value in arguments.items() if name not in _AUDIO_ARGUMENTS}
        if not isinstance(content, Audio):
            return super().process(modality, content, visual)
        assert self.sound is not None
        self.read_arguments("image", visual)
        samples = read_samples(
            content,
            self.audio_settings,
            {name: value for name, value in arguments.items() if name in _AUDIO_ARGUMENTS},
            rate=self.log_mel.rate,
            longest=_LONGEST,
            fewest=self.log_mel.frame // 2 + 1,
        )
        mel = self.log_mel(np.pad(samples, (self.log_mel.frame // 2, 0)))
        span = self._audio_span(self.sound, -(-len(mel) // 4))
        return self.build_item(span, self.sound.audio_id, arrays={"mel": Array.of(mel)})

    def _audio_span(self, sound: Gemma4AudioFacts, num_vectors: int) -> list[int]:
        return [sound.start_id, *[sound.audio_id] * num_vectors, sound.end_id]

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        if modality != "audio" or self.sound is None:
            return super().process_embeds(modality, embeds)
        vectors = read_vectors(modality, embeds, self.hidden)
        span = self._audio_span(self.sound, len(vectors))
        return self.build_item(span, self.sound.audio_id, arrays={"embeds": Array.of(vectors)})

    def process_video(self, video: Video, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        check_frames(len(video.frames))
        size = self._size((video.frames.shape[1], video.frames.shape[2]), self._max_soft_tokens(keys))
        pixels = np.stack([self.resize(Image.fromarray(frame), size, keys) for frame in video.frames])
        rate = video.source_fps or video.fps or USUAL_FPS
        span = list[int]()
        for number, index in enumerate(video.indices or range(len(pixels))):
            time = f"{int(index / rate // 60):02d}:{int(index / rate % 60):02d} "
            span += self.tokenizer.encode(time if number == 0 else f" {time}", add_special_tokens=False)
            count = size[0] * size[1] // self.unit**2
            span += [self.facts.begin_id, *[self.video_id] * count, self.facts.end_id]
        return self.build_item(span, self.video_id, arrays=scaling(pixels))

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        check_frames(len(video.frames))
        with argument_errors():
            keys = self.read_arguments("video", arguments)
            size = self._size((video.frames.shape[1], video.frames.shape[2]), self._max_soft_tokens(keys))
        return len(video.frames) * (size[0] * size[1] // self.unit**2)

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        height, width = self._size(image.size[::-1], self._max_soft_tokens(keys))
        pixels = self.resize(image, (height, width), keys)
        count = height * width // self.unit**2
        span = [self.facts.begin_id, *[self.image_id] * count, self.facts.end_id]
        return self.build_item(span, arrays=scaling(pixels))

    def _max_soft_tokens(self, keys: ConfigReader) -> int:
        most = keys.size("max_soft_tokens", 280)
        if most not in _SOFT_TOKENS:
            raise keys.wrong("max_soft_tokens", f"one of {', '.join(map(str, _SOFT_TOKENS))}")
        return most

    def _size(self, image: Size, most: int) -> Size:
        """Return the largest (height, width) in pixels with about the image's aspect ratio and at most `most`
        squares of patches."""
        unit, factor = self.unit, math.sqrt(most * self.unit**2 / (image[0] * image[1]))
        height, width = (int(factor * side / unit) * unit for side in image)
        if height == 0:
            return unit, min(image[1] // image[0], most) * unit
        if width == 0:
            return min(image[0] // image[1], most) * unit, unit
        return height, width

    def max_vectors(self, modality: str) -> int:
        if modality == "audio":
            return -(-((_LONGEST - 1) // self.log_mel.hop) // 4)
        if modality == "video":
            return MAX_FRAMES * self._max_soft_tokens(self.video_settings)
        return self._max_soft_tokens(self.settings)

    def largest(self, modality: str) -> tuple[int, ...]:
        """Return the length of the longest audio. Images and frames of one row of squares use all soft
        tokens."""
        if modality == "audio":
            return (_LONGEST,)
        keys = self.video_settings if modality == "video" else self.settings
        size = self._max_soft_tokens(keys) * self.unit, self.unit
        return (MAX_FRAMES, *size) if modality == "video" else size
