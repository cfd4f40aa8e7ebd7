"""Limits of the size of decoded items and of the memory for decoding."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import RequestError
from quire.multimodal.processors import Video

Check = Callable[[Video], None]
"""Takes a black video of the size to decode; raises a RequestError if it is too large."""
Take = Callable[[int], None]
"""Reserves bytes for decoding once they are free; raises a RequestError for more than the whole budget."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits for decoding one item."""

    max_pixels: int
    """Largest number of pixels of an image."""
    check: Check = lambda video: None
    take: Take = lambda num_bytes: None

    def check_pixels(self, width: int, height: int, count: int = 1, *, times: int = 1) -> None:
        """Refuse `count` frames of this size if they have more than `times * max_pixels` pixels together."""
        num_pixels, most = width * height * count, times * self.max_pixels
        if num_pixels > most:
            prefix = f"{count} frames of " if count > 1 else ""
            raise RequestError(
                f"{prefix}{width} x {height} are {num_pixels} pixels, and {most} are the maximum "
                "(VLLM_MAX_IMAGE_PIXELS)"
            )
