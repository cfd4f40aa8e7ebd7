"""Decoding of bytes to an image, a video or audio, with errors and limits checked as early as possible."""

from collections.abc import Mapping
from typing import Any

from quire.multimodal.audio import decode_audio
from quire.multimodal.fetch import Blob
from quire.multimodal.image_files import decode_image
from quire.multimodal.limits import DecodeLimits
from quire.multimodal.processors import Content
from quire.multimodal.video import decode_video

__all__ = ["DecodeLimits", "decode"]


def decode(modality: str, blob: Blob, options: Mapping[str, Any], limits: DecodeLimits) -> Content:
    """Decode the file of an image, video or audio; `options` are the media_io_kwargs of the modality. Raise a
    RequestError if the file is invalid or exceeds the limits."""
    if modality == "image":
        return decode_image(blob.parts[0], options, limits)
    if modality == "audio":
        return decode_audio(blob.parts[0], limits.take)
    return decode_video(blob, options, limits)
