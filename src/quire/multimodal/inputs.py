"""Images, videos and audio as requests contain them, and their cache keys."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import RequestError
from quire.multimodal.fetch import Blob
from quire.multimodal.processors import Audio, ProcessedItem, Video


class MediaLink(NamedTuple):
    """The url of an image, video or audio file that has to be fetched: http(s):, data: or file:."""

    url: str


class Base64Media(NamedTuple):
    """An image, video or audio file as base64 text."""

    text: str


Embeds = dict[str, NDArray[Any]]
"""Embeddings that a user sends in place of an item: arrays by name, such as `embeds` and `image_grid_thw`."""
Source = MediaLink | Base64Media | Blob | Image.Image | Video | Audio | Embeds | None


@dataclass(slots=True)
class MediaInput:
    """One image, video or audio of a prompt, as the request contains it."""

    modality: str
    source: Source
    """Content of the item. None if the request has only the uuid of an item, which must be in the cache."""
    place: str
    """Description of the item's position in the request, for error messages."""
    param: str | None = None
    """Request field to name in errors."""
    uuid: str | None = None
    """Identifier that the client chose. It replaces the content in the cache key."""
    salt: str | None = None
    """Cache salt of the request. Items with a uuid are shared only by requests with the same salt."""
    scope: str = ""
    """Cache scope of the request, such as its API key. Items of two scopes have different cache keys."""

    @property
    def text(self) -> str | None:
        """Return the text of an item that was sent as a data: url or as base64. Return None for other items,
        items with a uuid, and text that is not ASCII."""
        match self.source:
            case MediaLink(text) if text[:5].lower() == "data:":
                pass
            case Base64Media(text):
                pass
            case _:
                return None
        return text if self.uuid is None and text.isascii() else None

    def wrong(self, error: RequestError) -> RequestError:
        return type(error)(f"{self.place}: {error}", error.param or self.param)


class MediaKeys:
    """Computes cache keys of items: hashes that are equal for the same content and processing arguments."""

    def __init__(self, algorithm: str) -> None:
        """Choose the hash function `algorithm` (mm_hasher_algorithm). If it is blake3 and that package is
        missing, sha256 is used."""
        self._new: Any = getattr(hashlib, algorithm, hashlib.sha256)
        if algorithm == "blake3":
            try:
                from blake3 import blake3
            except ImportError:
                pass
            else:
                self._new = blake3

    def of(self, item: MediaInput, *read_with: Mapping[str, Any]) -> bytes:
        uuid = [f"uuid {item.uuid}".encode(), f"{item.salt or ''}".encode()]
        named = uuid if item.uuid is not None else _contents(item.source)
        how = msgspec.json.encode(read_with, order="sorted", enc_hook=repr)
        scope = [f"scope {item.scope}".encode()] if item.scope else []
        return self._of(*scope, item.modality.encode(), how, *named)

    def fitted(self, key: bytes, processed: ProcessedItem) -> bytes:
        """Return the cache key of a processed item with a uuid: a hash of `key` (a hash of the uuid), the
        span and the shapes. A different item with the same uuid thus cannot break the encoder."""
        arrays = {name: (array.dtype, array.shape) for name, array in (processed.arrays or {}).items()}
        form = msgspec.json.encode((processed.token_ids, processed.runs, arrays), order="sorted")
        return self._of(key, form)

    def _of(self, *pieces: Any) -> bytes:
        digest = self._new()
        for piece in pieces:
            # The length before each piece ensures that different lists of pieces have different bytes.
            digest.update(memoryview(piece).nbytes.to_bytes(8, "little"))
            digest.update(piece)
        result: bytes = digest.digest()
        return result


def _contents(source: Source) -> Iterable[Any]:
    match source:
        case MediaLink(text) | Base64Media(text):  # the url or base64 text itself
            return [type(source).__name__.encode(), text.encode()]
        case Blob(parts, media_type):
            return [b"file", b"frames" if media_type == "video/jpeg" else b"", *parts]
        case Image.Image():
            return [f"image {source.mode} {source.size}".encode(), source.tobytes()]
        case Video(frames):
            return [f"video {source[1:]}".encode(), *_array(frames)]
        case Audio(samples, rate):
            return [f"sound {rate}".encode(), *_array(samples)]
        case dict():
            return [piece for name in sorted(source) for piece in (name.encode(), *_array(source[name]))]
    raise AssertionError(source)


def _array(numbers: NDArray[Any]) -> tuple[bytes, Any]:
    numbers = np.ascontiguousarray(numbers)
    return f"{numbers.dtype.str} {numbers.shape}".encode(), numbers.reshape(-1).view(np.uint8).data
