"""Items as users bring them, and what they are known by."""

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
from quire.multimodal.processors import ProcessedItem, Sound, Video


class MediaLink(NamedTuple):
    """An item that has to be fetched."""

    url: str


class Base64Media(NamedTuple):
    """An item as the text of its file."""

    text: str


Embeds = dict[str, NDArray[Any]]
"""Vectors in place of an item, and what belongs to them."""
Source = MediaLink | Base64Media | Blob | Image.Image | Video | Sound | Embeds | None


@dataclass(slots=True)
class MediaInput:
    """One item of a prompt."""

    modality: str
    source: Source
    """None: whoever has its uuid has it already."""
    place: str
    """Where it stands in what was sent, for errors."""
    param: str | None = None
    """The field at fault if it cannot be had."""
    uuid: str | None = None
    """What its sender knows it by, in place of its content;"""
    salt: str | None = None
    """only among those who have the same."""
    scope: str = ""
    """The cache scope of its request (data/cache_scope.py): items of two scopes have different keys."""

    @property
    def text(self) -> str | None:
        """Of an item that came as its content, in ASCII, what it came as."""
        match self.source:
            case MediaLink(text) if text[:5].lower() == "data:":
                pass
            case Base64Media(text):
                pass
            case _:
                return None
        return text if self.uuid is None and text.isascii() else None

    def wrong(self, error: RequestError) -> RequestError:
        """The error with the item's place in it."""
        return type(error)(f"{self.place}: {error}", error.param or self.param)


class MediaKeys:
    """Makes keys: the same for the same content, read in the same way."""

    def __init__(self, algorithm: str) -> None:
        """One of mm_hasher_algorithm; blake3 is a package, and without it sha256 does."""
        self._new: Any = getattr(hashlib, algorithm, hashlib.sha256)
        if algorithm == "blake3":
            try:
                from blake3 import blake3
            except ImportError:
                pass
            else:
                self._new = blake3

    def of(self, given: MediaInput, *read_with: Mapping[str, Any]) -> bytes:
        uuid = [f"uuid {given.uuid}".encode(), f"{given.salt or ''}".encode()]
        named = uuid if given.uuid is not None else _contents(given.source)
        how = msgspec.json.encode(read_with, order="sorted", enc_hook=repr)
        scope = [f"scope {given.scope}".encode()] if given.scope else []
        return self._of(*scope, given.modality.encode(), how, *named)

    def fitted(self, key: bytes, processed: ProcessedItem) -> bytes:
        """The key of an item by its uuid, for items that became as much as it has. Others have the same uuid
        if two users chose it: theirs may be mistaken for it, but must fit."""
        arrays = {name: (each.dtype, each.shape) for name, each in (processed.arrays or {}).items()}
        form = msgspec.json.encode((processed.token_ids, processed.runs, arrays), order="sorted")
        return self._of(key, form)

    def _of(self, *pieces: Any) -> bytes:
        digest = self._new()
        for piece in pieces:
            # Each with its length in front: no two lists of pieces run together into the same bytes.
            digest.update(memoryview(piece).nbytes.to_bytes(8, "little"))
            digest.update(piece)
        found: bytes = digest.digest()
        return found


def _contents(source: Source) -> Iterable[Any]:
    match source:
        case MediaLink(text) | Base64Media(text):  # the text, not what it stands for
            return [type(source).__name__.encode(), text.encode()]
        case Blob(parts, media_type):
            return [b"file", b"frames" if media_type == "video/jpeg" else b"", *parts]
        case Image.Image():
            return [f"image {source.mode} {source.size}".encode(), source.tobytes()]
        case Video(frames):
            return [f"video {source[1:]}".encode(), *_array(frames)]
        case Sound(samples, rate):
            return [f"sound {rate}".encode(), *_array(samples)]
        case dict():
            return [piece for name in sorted(source) for piece in (name.encode(), *_array(source[name]))]
    raise AssertionError(source)


def _array(numbers: NDArray[Any]) -> tuple[bytes, Any]:
    numbers = np.ascontiguousarray(numbers)
    return f"{numbers.dtype.str} {numbers.shape}".encode(), numbers.reshape(-1).view(np.uint8).data
