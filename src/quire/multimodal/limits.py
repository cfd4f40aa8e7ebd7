"""Limits on the size of decoded images, videos and audio, and on the memory used to decode them."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import RequestError
from quire.multimodal.processors import Video

Check = Callable[[Video], None]
"""Function that gets a black video of the final size before a video is decoded. It raises a RequestError if
the video has too many tokens for a prompt."""
Take = Callable[[int], None]
"""Function that reserves this many bytes for decoding, and waits until they are free. It raises a
RequestError for more bytes than can ever be free."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits for decoding one image, video or audio file."""

    max_pixels: int
    """Largest number of pixels of an image."""
    check: Check = lambda video: None
    take: Take = lambda num_bytes: None

    def check_pixels(self, width: int, height: int, count: int = 1, *, times: int = 1) -> None:
        """Raise a RequestError if `count` frames of this size have more than `times * max_pixels` pixels."""
        num_pixels, most = width * height * count, times * self.max_pixels
        if num_pixels > most:
            prefix = f"{count} frames of " if count > 1 else ""
            raise RequestError(
                f"{prefix}{width} x {height} are {num_pixels} pixels, and {most} are the maximum "
                "(VLLM_MAX_IMAGE_PIXELS)"
            )
