"""Limits: what may be decoded, and the memory that it takes."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import RequestError
from quire.multimodal.processors import Video

Check = Callable[[Video], None]
"""Takes a black video of the size that would be decoded; a RequestError if it is too large."""
Take = Callable[[int], None]
"""Takes the number of bytes that decoding is about to need, and waits until there is room for them; a
RequestError if there never will be."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The limits of one item."""

    max_pixels: int
    """Of an image."""
    check: Check = lambda video: None
    take: Take = lambda num_bytes: None

    def check_pixels(self, width: int, height: int, count: int = 1, *, times: int = 1) -> None:
        """Refuse `count` pictures of this size with more pixels than `times` those of an image."""
        num_pixels, most = width * height * count, times * self.max_pixels
        if num_pixels > most:
            several = f"{count} pictures of " if count > 1 else ""
            raise RequestError(
                f"{several}{width} x {height} are {num_pixels} pixels, and there may be {most} "
                "(VLLM_MAX_IMAGE_PIXELS)"
            )
