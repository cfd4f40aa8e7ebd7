"""Images out of files, as RGB."""

import functools
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from quire.errors import RequestError
from quire.multimodal.gif import count_frames

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO")
"""Those of Pillow's that are pixels and nothing else."""
_WHITE = (255, 255, 255)
_MARKUP = (b"<", b"\xef\xbb\xbf<", b"\x1f\x8b")
"""What SVG begins with, and HTML; packed SVG as well."""
_HEAD_BYTES = 1024


def decode_image(data: bytes, options: Mapping[str, Any], *, max_pixels: int) -> Image.Image:
    """The first picture of the file, upright."""
    background = background_of(options)
    with opened(data, max_pixels=max_pixels) as image:
        image.load()
        return to_rgb(ImageOps.exif_transpose(image), background)


def to_rgb(image: Image.Image, background: tuple[int, int, int] = _WHITE) -> Image.Image:
    """What can be seen through is laid on the background; of 16 bits the upper ones count."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith("I"):
        numbers = np.asarray(image).astype(np.int64)
        if image.mode != "I" or numbers.max(initial=0) > 255:
            numbers >>= 8
        return Image.fromarray(numbers.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        below = Image.new("RGB", seen.size, background)
        below.paste(seen, mask=seen.getchannel("A"))
        return below
    return image.convert("RGB")


def background_of(options: Mapping[str, Any]) -> tuple[int, int, int]:
    given = options.get("rgba_background_color", _WHITE)
    if (
        not isinstance(given, list | tuple)
        or len(given) != 3
        or not all(type(part) is int and 0 <= part <= 255 for part in given)
    ):
        raise RequestError(
            "rgba_background_color must be a list or tuple of 3 integers in the range [0, 255].",
            param="media_io_kwargs",
        )
    red, green, blue = given
    return red, green, blue


@contextmanager
def opened(data: bytes, *, max_pixels: int) -> Iterator[Image.Image]:
    """The file with its head read, and no more: it is small enough to be decoded."""
    head = data[:_HEAD_BYTES].lstrip()
    if head.startswith(_MARKUP):
        kind = "an SVG, which is not drawn here" if b"<svg" in head.lower() else "markup, or packed"
        raise RequestError(f"it is not an image of pixels but {kind}")
    try:
        if data.startswith(b"GIF8"):
            count_frames(data)
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            check_pixels(*image.size, max_pixels=max_pixels)
            yield image
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise RequestError("it is not an image, or of a kind that is not known here") from None
    except Image.DecompressionBombError:
        raise RequestError(f"its picture has more than {max_pixels} pixels") from None
    except Exception as error:  # decoders raise whatever they stumble over
        raise RequestError(f"the file is broken or cut off: {error}") from None


@functools.cache
def _formats() -> list[str]:
    """Those that this Pillow was built with."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def allow_pixels(count: int) -> None:
    """Pillow has a limit of its own, for the whole process: twice this number."""
    if Image.MAX_IMAGE_PIXELS is not None and count > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = count // 2 + 1


def check_pixels(width: int, height: int, count: int = 1, *, max_pixels: int) -> None:
    if width * height * count > max_pixels:
        several = f"{count} pictures of " if count > 1 else ""
        raise RequestError(
            f"{several}{width} x {height} are {width * height * count} pixels, and there may be {max_pixels} "
            "(VLLM_MAX_IMAGE_PIXELS)"
        )
