"""Images out of files, as RGB."""

import functools
import io
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from quire.errors import RequestError
from quire.multimodal.gif import count_frames
from quire.multimodal.limits import DecodeLimits

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO")
"""Those of Pillow's that are pixels and nothing else."""
_WHITE = (255, 255, 255)
_MARKUP = (b"<", b"\xef\xbb\xbf<", b"\x1f\x8b")
"""What SVG begins with, and HTML; packed SVG as well."""
_ICON = b"\0\0\1\0"
_HEAD_BYTES = 1024
_STORED_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes that Pillow stores for a pixel, by mode; all others take 4."""
_DECODER_BYTES = {"WEBP": 13, "AVIF": 8, "JPEG2000": 24, "GIF": 8}
"""Bytes of a pixel that decoders hold beside the picture, by format, as measured with Pillow 13,"""
_PROGRESSIVE = 6
"""and those of a progressive JPEG."""
_RGB_BYTES = 4
_STRIP_ROWS = 256


def decode_image(data: bytes, options: Mapping[str, Any], limits: DecodeLimits) -> Image.Image:
    """The first picture of the file, upright."""
    background = background_of(options)
    with opened(data, limits) as image:
        num_pixels = image.width * image.height
        limits.take(num_pixels * pixel_bytes(image))
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # in some files it follows the picture
            limits.take(num_pixels * _STORED_BYTES.get(image.mode, 4))
            ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image, background)


def pixel_bytes(image: Image.Image) -> int:
    """Return the bytes for each pixel that decoding the image and making it RGB takes at most, out of its
    head."""
    stored = _STORED_BYTES.get(image.mode, 4)
    decoder = _DECODER_BYTES.get(image.format or "", 0)
    if image.format == "JPEG" and image.info.get("progressive"):
        decoder = _PROGRESSIVE
    made = 0 if image.mode == "RGB" else _RGB_BYTES
    if image.has_transparency_data:
        made = _RGB_BYTES if image.mode == "RGBA" else 2 * _RGB_BYTES
    elif stored == 2 or image.mode in ("I", "F"):  # by way of 8 bits
        made += 1
    return stored + max(decoder, made)


def to_rgb(image: Image.Image, background: tuple[int, int, int] = _WHITE) -> Image.Image:
    """What can be seen through is laid on the background; of 16 bits the upper ones count."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith("I"):
        return _upper_bits(image).convert("RGB")
    if image.has_transparency_data:
        seen = image if image.mode == "RGBA" else image.convert("RGBA")
        below = Image.new("RGB", seen.size, background)
        below.paste(seen, mask=seen)
        return below
    return image.convert("RGB")


def _upper_bits(image: Image.Image) -> Image.Image:
    """Return greys of 16 or 32 bits as greys of 8, strip by strip: copies of a whole picture would take
    several times its memory."""
    _, most = image.getextrema()
    is_wide = image.mode != "I" or (isinstance(most, int | float) and most > 255)
    grey = Image.new("L", image.size)
    for top in range(0, image.height, _STRIP_ROWS):
        bottom = min(top + _STRIP_ROWS, image.height)
        numbers = np.asarray(image.crop((0, top, image.width, bottom)))
        if is_wide:
            numbers = numbers >> 8
        grey.paste(Image.fromarray(numbers.clip(0, 255).astype(np.uint8)), (0, top))
    return grey


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
def opened(data: bytes, limits: DecodeLimits) -> Iterator[Image.Image]:
    """The file with its head read, and no more: it is small enough to be decoded."""
    head = data[:_HEAD_BYTES].lstrip()
    if head.startswith(_MARKUP):
        kind = "an SVG, which is not drawn here" if b"<svg" in head.lower() else "markup, or packed"
        raise RequestError(f"it is not an image of pixels but {kind}")
    try:
        if data.startswith(b"GIF8"):
            count_frames(data)
        if data.startswith(_ICON):
            _check_icon(data)
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            limits.check_pixels(*image.size)
            yield image
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise RequestError("it is not an image, or of a kind that is not known here") from None
    except Image.DecompressionBombError:
        raise RequestError(f"its picture has more than {limits.max_pixels} pixels") from None
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


def _check_icon(data: bytes) -> None:
    """Refuse icons whose pictures are not of the size that their directory says: Pillow believes the
    directory, and decodes what is there as soon as the file is opened."""
    (count,) = struct.unpack_from("<H", data, 4)
    for place in range(6, 6 + 16 * count, 16):
        width, height, *_, offset = struct.unpack_from("<BBBBHHII", data, place)
        if data.startswith(b"\x89PNG", offset):
            size = struct.unpack_from(">II", data, offset + 16)
        else:
            width_stored, height_stored = struct.unpack_from("<ii", data, offset + 4)
            size = width_stored, abs(height_stored) // 2  # the mask is stored below the picture
        if size != (width or 256, height or 256):
            raise RequestError("it is an icon with a picture of another size than its directory says")
