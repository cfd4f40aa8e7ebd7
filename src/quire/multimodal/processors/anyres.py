"""LLaVA-Next, its Video model and LLaVA-OneVision: a whole image and its tiles, in the grid with the fewest
unused pixels."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.anyres import AnyresFacts
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array, Arrays
from quire.errors import ConfigError, RequestError
from quire.multimodal.images import (
    IMAGE_ARGUMENTS,
    MAX_FRAMES,
    Pixels,
    PixelScaling,
    Size,
    center_cropped,
    check_frames,
    fit_size,
    fitted,
    size_of,
    stored_settings,
    tiled,
    video_settings,
)
from quire.multimodal.processors import ProcessedItem, Video
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer

_SLACK = 1.1
"""Factor by which an image may exceed the maximum patches per side before embeddings are interpolated."""


class AnyresProcessor(ImageProcessor):
    """Processor of LLaVA-NeXT and LLaVA-OneVision. It orders the embeddings of an image row by row over all
    tiles, without padding; a newline embedding ends each row."""

    facts: AnyresFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer)
        self.video_settings = video_settings(path, stored_settings(path, "video_processor"))

    def marks(self, modality: str) -> list[int]:
        video = self.facts.video_id
        return [video if modality == "video" and video is not None else self.mark]

    def text(self, modality: str, number: int) -> str:
        return self.tokenizer.backend.id_to_token(self.marks(modality)[0]) or ""

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        side = self.facts.vit.image
        parts = tiled(self._padded(image, keys), (side, side))
        tiles = np.concatenate((self.resize_to_square(image, keys)[None], parts))
        arrays = scaling(tiles) | self._order(image.size[::-1])
        return ProcessedItem([self.image_id] * arrays["places"].shape[0], arrays=arrays)

    def _padded(self, image: Image.Image, keys: ConfigReader) -> Pixels:
        """Resize an image to fit into the best of the model's tiled shapes, and center it on a black
        background."""
        high, wide = shape = best_shape(image.size[::-1], self.facts.shapes)
        size = fit_size(image.size[::-1], shape, rounding=math.ceil)
        out = np.zeros((high, wide, 3), np.uint8)
        top, left = (high - size[0]) // 2, (wide - size[1]) // 2
        out[top : top + size[0], left : left + size[1]] = self.resize(image, size, keys)
        return out

    def _order(self, image: Size) -> Arrays:
        facts, shape = self.facts, best_shape(image, self.facts.shapes)
        numbers, weights = order_of(image, shape, facts.vit.image, facts.vit.side, facts.most_tiles)
        rows, columns = numbers.shape[:2]
        behind = facts.tokens * (1 + math.prod(shape) // facts.vit.image**2)
        numbers = np.concatenate((facts.tokens + numbers, np.full((rows, 1, numbers.shape[2]), behind)), 1)
        base = np.repeat(np.arange(facts.tokens)[:, None], numbers.shape[2], 1)
        places = np.concatenate((base, numbers.reshape(-1, numbers.shape[2]))).astype(np.int32)
        if weights is None:
            return {"places": Array.of(places)}
        shares = np.zeros((*places.shape[:1], 4), np.float32)
        shares[:, 0] = 1
        inner = shares[facts.tokens :].reshape(rows, columns + 1, 4)
        inner[:, :columns] = weights
        return {"places": Array.of(places), "weights": Array.of(shares)}

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        check_frames(len(video.frames))
        return len(video.frames) * math.ceil(self.facts.vit.side / 2) ** 2 + 1

    def process_video(self, video: Video, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        span = self.marks("video") * self.num_vectors(video, {})
        return ProcessedItem(span, arrays=scaling(self.resize_frames(video, keys)))

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        if modality != "image":
            raise RequestError("embeddings are supported for images only", "multi_modal_data")
        return super().process_embeds(modality, embeds)

    def max_vectors(self, modality: str) -> int:
        if modality == "video":
            return self.num_vectors(Video.black(*self.largest(modality)), {})
        width, height = self.largest(modality)
        return self._order((height, width))["places"].shape[0]

    def largest(self, modality: str) -> tuple[int, ...]:
        side = self.facts.vit.image
        if modality == "video":
            return MAX_FRAMES, side, side
        height, width = max(self.facts.shapes, key=lambda shape: self._order(shape)["places"].shape[0])
        return width, height


class PooledVideoProcessor(AnyresProcessor):
    """Processor of LLaVA-Next-Video, which takes the center of each frame, with a quarter of the
    embeddings."""

    arguments = (*IMAGE_ARGUMENTS, "do_center_crop", "crop_size")

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        check_frames(len(video.frames))
        side: int = self.facts.vit.side // 2
        return len(video.frames) * side**2

    def resize_frames(self, video: Video, keys: ConfigReader) -> NDArray[np.uint8]:
        side, size = self.facts.vit.image, (video.frames.shape[1], video.frames.shape[2])
        keys = keys.defaults(size={"shortest_edge": side})
        size = fitted(size_of(keys), size) if keys.flag("do_resize", True) else size
        frames = [self.resize(Image.fromarray(frame), size, keys) for frame in video.frames]
        if keys.flag("do_center_crop", True):
            crop = size_of(keys.defaults(crop_size=side), "crop_size")
            frames = [
                center_cropped(frame, (crop.get("height", 0), crop.get("width", 0))) for frame in frames
            ]
        if frames[0].shape[:2] != (side, side):
            raise ConfigError(
                f"{keys.source}: frames are resized to {frames[0].shape[1]} x {frames[0].shape[0]}, but the "
                f"vision encoder needs {side} x {side}"
            )
        return np.stack(frames)


@lru_cache
def best_shape(image: Size, shapes: Sequence[Size]) -> Size:
    """Return the one of `shapes` (height, width) in which a resized image keeps the most of its pixels; among
    equals, the one with the least padding."""
    height, width = image

    def worth(shape: Size) -> tuple[int, int]:
        scale = min(shape[1] / width, shape[0] / height)
        num_pixels = min(int(width * scale) * int(height * scale), width * height)
        return num_pixels, num_pixels - shape[0] * shape[1]

    return max(shapes, key=worth)


def order_of(
    image: Size, shape: Size, tile: int, side: int, most_tiles: int
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """Return the index of the patch that shows each part of an image, [rows, columns, 1], and None for
    weights. `shape` is the size of the tiled image in pixels; `tile` and `side` are the sides of a tile in
    pixels and in patches.

    If there are too many patches, return the indices of the four patches around each point, [rows, columns,
    4], and their weights for bilinear interpolation."""
    rows, columns = shape[0] // tile, shape[1] // tile
    tiles = np.arange(rows * columns * side * side).reshape(rows, columns, side, side)
    numbers = tiles.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
    height, width = image
    high, wide = numbers.shape
    if width / height > wide / high:
        cut = (high - int(round(height * (wide / width), 7))) // 2
        numbers = numbers[cut : high - cut]
    else:
        cut = (wide - int(round(width * (high / height), 7))) // 2
        numbers = numbers[:, cut : wide - cut]
    high, wide = numbers.shape
    ratio = math.sqrt(high * wide / (most_tiles * side**2)) if most_tiles else 0
    if ratio <= _SLACK:
        return numbers[..., None], None
    (above, below, down), (left, right, along) = (_between(size, int(size // ratio)) for size in (high, wide))
    around = [numbers[row][:, column] for row in (above, below) for column in (left, right)]
    shares = [np.outer(y, x) for y in (1 - down, down) for x in (1 - along, along)]
    return np.stack(around, -1), np.stack(shares, -1).astype(np.float32)


def _between(size: int, fewer: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Choose `fewer` evenly spaced points on a line of `size` points, at the positions at which torch
    interpolates. For each, return the indices of the points before and after it, and the weight of the
    latter."""
    at = np.maximum((np.arange(fewer) + 0.5) * (size / fewer) - 0.5, 0)
    before = np.floor(at).astype(np.int64)
    return before, np.minimum(before + 1, size - 1), at - before
