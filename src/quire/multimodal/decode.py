"""Decoding: bytes become an image, a video or a sound. What is wrong with them, or more than there may be, is
found as early as it can be known."""

from collections.abc import Mapping
from typing import Any

from quire.multimodal.families import Content
from quire.multimodal.fetch import Blob
from quire.multimodal.image_files import decode_image
from quire.multimodal.sound import decode_sound
from quire.multimodal.video import Check, decode_video


def decode(
    modality: str,
    blob: Blob,
    options: Mapping[str, Any],
    *,
    max_pixels: int,
    check: Check = lambda video: None,
) -> Content:
    """`options` are the media_io_kwargs of the modality. A RequestError says what cannot be read. Videos are
    shown to `check` before."""
    if modality == "image":
        return decode_image(blob.parts[0], options, max_pixels=max_pixels)
    if modality == "audio":
        return decode_sound(blob.parts[0])
    return decode_video(blob, options, max_pixels=max_pixels, check=check)
