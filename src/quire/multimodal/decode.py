"""Decoding: bytes become an image, a video or a sound. What is wrong with them, or more than there may be, is
found as early as it can be known."""

from collections.abc import Mapping
from typing import Any

from quire.multimodal.audio import decode_sound
from quire.multimodal.fetch import Blob
from quire.multimodal.image_files import decode_image
from quire.multimodal.limits import DecodeLimits
from quire.multimodal.processors import Content
from quire.multimodal.video import decode_video

__all__ = ["DecodeLimits", "decode"]


def decode(modality: str, blob: Blob, options: Mapping[str, Any], limits: DecodeLimits) -> Content:
    """`options` are the media_io_kwargs of the modality. A RequestError says what cannot be read, or what is
    beyond the limits."""
    if modality == "image":
        return decode_image(blob.parts[0], options, limits)
    if modality == "audio":
        return decode_sound(blob.parts[0], limits.take)
    return decode_video(blob, options, limits)
