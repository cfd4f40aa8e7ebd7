"""Decoding of image files to RGB."""

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
"""Accepted image formats, by Pillow's names. Files of these formats contain only pixels."""
_WHITE = (255, 255, 255)
_MARKUP = (b"<", b"\xef\xbb\xbf<", b"\x1f\x8b")
"""First bytes of SVG, HTML and gzipped SVG."""
_ICON = b"\0\0\1\0"
_HEAD_BYTES = 1024
_STORED_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes per pixel of a decoded Pillow image, by mode; images of all other modes have 4."""
_DECODER_BYTES = {"WEBP": 13, "AVIF": 8, "JPEG2000": 24, "GIF": 8}
"""Bytes per pixel that a decoder uses besides the decoded image, by format, as measured with Pillow 13."""
_PROGRESSIVE = 6
"""Bytes per pixel that the decoder of a progressive JPEG uses besides the decoded image."""
_RGB_BYTES = 4
_STRIP_ROWS = 256


def decode_image(data: bytes, options: Mapping[str, Any], limits: DecodeLimits) -> Image.Image:
    """Decode the first image of a file to RGB, rotated by its EXIF orientation."""
    background = background_of(options)
    with opened(data, limits) as image:
        num_pixels = image.width * image.height
        limits.take(num_pixels * pixel_bytes(image))
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # EXIF data may follow the pixels
            limits.take(num_pixels * _STORED_BYTES.get(image.mode, 4))
            ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image, background)


def pixel_bytes(image: Image.Image) -> int:
    """Return the peak number of bytes per pixel that decoding an image and converting it to RGB uses."""
    stored = _STORED_BYTES.get(image.mode, 4)
    decoder = _DECODER_BYTES.get(image.format or "", 0)
    if image.format == "JPEG" and image.info.get("progressive"):
        decoder = _PROGRESSIVE
    converted = 0 if image.mode == "RGB" else _RGB_BYTES
    if image.has_transparency_data:
        converted = _RGB_BYTES if image.mode == "RGBA" else 2 * _RGB_BYTES
    elif stored == 2 or image.mode in ("I", "F"):  # converted to 8 bits first
        converted += 1
    return stored + max(decoder, converted)


def to_rgb(image: Image.Image, background: tuple[int, int, int] = _WHITE) -> Image.Image:
    """Convert an image to RGB: transparency shows the background, 16-bit values keep the upper 8 bits."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith("I"):
        return _upper_bits(image).convert("RGB")
    if image.has_transparency_data:
        with_alpha = image if image.mode == "RGBA" else image.convert("RGBA")
        opaque = Image.new("RGB", with_alpha.size, background)
        opaque.paste(with_alpha, mask=with_alpha)
        return opaque
    return image.convert("RGB")


def _upper_bits(image: Image.Image) -> Image.Image:
    """Convert an image with 16-bit or 32-bit grey values to the upper 8 bits of a 16-bit value. Strips of
    rows are converted one after another, since copies of the whole image would take several times its
    memory."""
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
    color = options.get("rgba_background_color", _WHITE)
    if (
        not isinstance(color, list | tuple)
        or len(color) != 3
        or not all(type(part) is int and 0 <= part <= 255 for part in color)
    ):
        raise RequestError(
            "rgba_background_color must be a list or tuple of 3 integers in the range [0, 255].",
            param="media_io_kwargs",
        )
    red, green, blue = color
    return red, green, blue


@contextmanager
def opened(data: bytes, limits: DecodeLimits) -> Iterator[Image.Image]:
    """Open an image file for a `with` block, and read only its header. Raise a RequestError if its format or
    size is not allowed, and convert any error of decoding in the block to a RequestError."""
    head = data[:_HEAD_BYTES].lstrip()
    if head.startswith(_MARKUP):
        kind = "an SVG, which is not supported" if b"<svg" in head.lower() else "markup or gzip"
        raise RequestError(f"it is not a raster image but {kind}")
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
        raise RequestError("it is not an image, or its format is not supported") from None
    except Image.DecompressionBombError:
        raise RequestError(f"it has more than {limits.max_pixels} pixels") from None
    except Exception as error:  # decoders raise any exception
        error.__traceback__ = None  # its frames would keep the image in a reference cycle (Python 3.12)
        raise RequestError(f"the file is broken or truncated: {error}") from None


@functools.cache
def _formats() -> list[str]:
    """Return the accepted image formats that the installed Pillow can decode."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def allow_pixels(count: int) -> None:
    """Increase Pillow's limit of pixels per image in this process, twice MAX_IMAGE_PIXELS, to at least
    `count`."""
    if Image.MAX_IMAGE_PIXELS is not None and count > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = count // 2 + 1


def _check_icon(data: bytes) -> None:
    """Raise a RequestError for an .ico file if the size of an image differs from the size in the file's
    directory. Pillow relies on the directory, and decodes the image as soon as the file is opened."""
    (count,) = struct.unpack_from("<H", data, 4)
    for place in range(6, 6 + 16 * count, 16):
        width, height, *_, offset = struct.unpack_from("<BBBBHHII", data, place)
        if data.startswith(b"\x89PNG", offset):
            size = struct.unpack_from(">II", data, offset + 16)
        else:
            width_stored, height_stored = struct.unpack_from("<ii", data, offset + 4)
            size = width_stored, abs(height_stored) // 2  # the stored height includes a mask
        if size != (width or 256, height or 256):
            raise RequestError("it is an icon with an image of another size than its directory has")
