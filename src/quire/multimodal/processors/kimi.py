"""Kimi-VL and Kimi-K2.5: an image of any size, padded to whole patches; a video as frames with timestamps."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.kimi import MoonFacts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import (
    HALF,
    IMAGE_ARGUMENTS,
    MAX_FRAMES,
    Pixels,
    PixelScaling,
    Size,
    argument_errors,
    center_cropped,
    check_frames,
    video_settings,
)
from quire.multimodal.processors import ProcessedItem, Video
from quire.multimodal.processors.grid import USUAL_FPS
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer

_OLDER = {
    "in_token_limit": "max_patches",
    "in_patch_limit": "max_patches",
    "patch_limit_on_one_side": "max_side",
}
"""Names of settings in transformers by their names in the original code."""
_VIDEO_MARK = "<|kimi_k25_video_placeholder|>"
"""Placeholder of a video in chat templates; not every tokenizer has it as a token."""
_MAX_PATCHES = 2**16
"""Maximum of the settings for the number of patches, in an image or along its side."""


class KimiVLProcessor(ImageProcessor):
    """Processor of Kimi-VL and Kimi-K2.5. It resizes an image only if it has too many patches, and pads it to
    whole squares of patches."""

    older_arguments = _OLDER
    arguments = (*_OLDER, *_OLDER.values(), "pad_input", *(set(IMAGE_ARGUMENTS) - {"size"}))
    mean = std = HALF
    facts: MoonFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer)
        stored = self.settings
        inner = stored.get("media_proc_cfg")
        stored = stored.but(**inner) if isinstance(inner, dict) else stored
        self.settings = _with_current_names(stored, 16384)
        max_frame_patches = stored.get("in_patch_limit_each_frame") or self.settings.get("max_patches")
        otherwise = self.settings.but(max_patches=max_frame_patches, in_token_limit=None, in_patch_limit=None)
        self.video_settings = _with_current_names(video_settings(path, otherwise), 4096)
        frames = self.facts.frames
        if self.video_settings.size("temporal_patch_size", frames) != frames:
            raise self.video_settings.wrong("temporal_patch_size", f"{frames}, as the vision encoder has")
        begins = ("<|media_begin|>", "<|media_start|>")
        self.begin = next((token for token in begins if tokenizer.backend.token_to_id(token) is not None), "")
        self.video_id = tokenizer.backend.token_to_id(_VIDEO_MARK)

    def marks(self, modality: str) -> list[int]:
        if modality == "image":
            return [self.mark]
        return self.tokenizer.encode(self._video_mark, add_special_tokens=False)

    @property
    def _video_mark(self) -> str:
        return _VIDEO_MARK if self.video_id is not None else self._framed("video", super().text("image", 1))

    def _framed(self, what: str, places: str) -> str:
        return f"{self.begin}{what}<|media_content|>{places}<|media_end|>" if self.begin else places

    def text(self, modality: str, number: int) -> str:
        return self._video_mark if modality == "video" else self._framed("image", super().text(modality, 1))

    def rewrite_text(self, text: str) -> str:
        """Replace each video placeholder of the chat template by the text of the model's video placeholder
        tokens."""
        return text.replace(_VIDEO_MARK, self._video_mark) if "video" in self.modalities else text

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        pixels = self._resize_to_patches(image, keys)
        return ProcessedItem([self.image_id] * self._count(pixels.shape), arrays=scaling(pixels))

    def _count(self, size: Sequence[int]) -> int:
        """Return the number of embeddings of an image with this height and width."""
        side = self.facts.patch * self.facts.merge
        return -(-size[0] // side) * -(-size[1] // side)

    def process_video(self, video: Video, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        check_frames(len(video.frames))
        pixels = np.stack([self._resize_to_patches(Image.fromarray(frame), keys) for frame in video.frames])
        indices = video.indices or tuple(range(len(pixels)))
        place = self.image_id if self.video_id is None else self.video_id
        name, span = self.tokenizer.backend.id_to_token(place) or "", list[int]()
        for index in indices[:: self.facts.frames]:
            time = _format_time(index / (video.source_fps or video.fps or USUAL_FPS))
            clip = time + self._framed("video", name)
            for token_id in self.tokenizer.encode(clip, add_special_tokens=False):
                span += [token_id] * (self._count(pixels.shape[1:]) if token_id == place else 1)
        return self.build_item(span, place=place, arrays=scaling(pixels))

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        check_frames(len(video.frames))
        with argument_errors():
            keys = self.read_arguments("video", arguments)
            size = video.frames.shape[1], video.frames.shape[2]
            size = self._reduced_size(size, keys) if keys.flag("do_resize", True) else size
        return -(-len(video.frames) // self.facts.frames) * self._count(size)

    def _resize_to_patches(self, image: Image.Image, keys: ConfigReader) -> Pixels:
        """Resize an image, and pad it with black, or crop it, to whole squares of patches."""
        size = image.size[::-1]
        if keys.flag("do_resize", True):
            size = self._reduced_size(size, keys)
        pixels = self.resize(image, size, keys)
        side = self.facts.patch * self.facts.merge
        if not keys.flag("pad_input", True):
            least = max(size[0] // side, 1) * side, max(size[1] // side, 1) * side
            return center_cropped(pixels, least)
        below, right = (-length % side for length in size)
        return np.pad(pixels, ((0, below), (0, right), (0, 0)))

    def _reduced_size(self, image: Size, keys: ConfigReader) -> Size:
        """Return the (height, width) in pixels of an image, reduced if it has too many patches in all or
        along a side."""
        for name in ("max_patches", "max_side"):
            if keys.size(name, 1) > _MAX_PATCHES:
                raise keys.wrong(name, f"{_MAX_PATCHES} at most")
        most, longest = keys.size("max_patches"), keys.size("max_side", 512) * self.facts.patch
        height, width = image
        patches = max(1, height // self.facts.patch) * max(1, width // self.facts.patch)
        scale = min(1.0, math.sqrt(most / patches), longest / height, longest / width)
        return min(max(1, int(height * scale)), longest), min(max(1, int(width * scale)), longest)

    def max_vectors(self, modality: str) -> int:
        *frames, width, height = self.largest(modality)
        clips = -(-frames[0] // self.facts.frames) if frames else 1
        return clips * self._count((height, width))

    def largest(self, modality: str) -> tuple[int, ...]:
        keys = self.video_settings if modality == "video" else self.settings
        side, most = self.facts.patch * self.facts.merge, keys.size("max_patches")
        longest = keys.size("max_side", 512)
        rows = min(math.isqrt(most), longest)
        columns = min(most // rows, longest)
        size = -(-columns // self.facts.merge) * side, -(-rows // self.facts.merge) * side
        return (MAX_FRAMES, *size) if modality == "video" else size


def _with_current_names(stored: ConfigReader, most: int) -> ConfigReader:
    """Return the settings under their names in transformers. `most` is the default of max_patches."""
    size = stored.get("size")
    side = size.get("max_height") if isinstance(size, dict) else stored.get("max_side")
    renamed = {_OLDER[name]: stored.get(name) for name in _OLDER if stored.get(name) is not None}
    return stored.but(**{"max_patches": stored.size("max_patches", most), "max_side": side} | renamed)


def _format_time(seconds: float) -> str:
    """Format a time as hh:mm:ss.mmm."""
    minutes, rest = divmod(seconds % 86400, 60)
    return f"{int(minutes) // 60:02}:{int(minutes) % 60:02}:{int(rest):02}.{int(seconds % 1 * 1000):03}"
