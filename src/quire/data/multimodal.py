"""Media: the images, videos and sounds of a prompt, as the numbers that a tower reads."""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

MODALITIES = ("image", "video", "audio")
_PLACE = struct.Struct("<iI")
"""Where a block begins in an item, and how long the item's key is."""


class Array(msgspec.Struct, frozen=True, eq=False):
    """Numbers on their way: those of bfloat16 as their bits, in uint16."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    """Their bytes; after a journey still in the message that they came in."""

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> "Array":
        numbers = np.ascontiguousarray(numbers)
        return cls(numbers.dtype.name, numbers.shape, numbers.reshape(-1).view(np.uint8).data)

    def numbers(self) -> NDArray[Any]:
        """As they are; nobody may write to them."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


Arrays = dict[str, Array]
"""By the names that the tower of a family knows them by."""
TABLE = "table"
"""One of these, [3, 256] float32: what bytes stand for in those that are bytes, [..., 3, height, width],
by colour. The tower is given those numbers."""
_NEVER = 1 << 31
pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Arrays).decode
"""Arrays as they lie in shared memory; nothing is copied on the way out."""
_ITEM_BYTES = 512
"""What an item takes beside its numbers."""


def size_of(arrays: Arrays) -> int:
    """Bytes, as caches count them."""
    return _ITEM_BYTES + sum(array.data.nbytes for array in arrays.values())


class StoredArrays(msgspec.Struct, weakref=True, eq=False):
    """Where the arrays of an item lie in shared memory. They stay there as long as there is one of these."""

    memory: str
    """A path that opens it."""
    start: int
    length: int
    generation: int
    """Tells it from what lay there before."""


class MediaItem(msgspec.Struct, omit_defaults=True, kw_only=True, eq=False):
    """One image, video or sound of a prompt, and the tokens that stand for it: its span."""

    modality: str
    """One of MODALITIES."""
    key: bytes
    """The same for the same content, read with the same arguments: what all caches know it by."""
    offset: int
    """Where its span begins in the prompt."""
    length: int
    """Tokens of its span; 0: none stands for it, and all of the sequence see it."""
    runs: list[tuple[int, int]] = []
    """The tokens of the span in whose place its vectors stand: first, and how many. Empty: all of them."""
    arrays: Arrays | None = None
    """What the tower reads. None: whoever gets the item has had them, by its key,"""
    stored: StoredArrays | None = None
    """or finds them there."""

    @property
    def end(self) -> int:
        """What lies behind has no need of it."""
        return self.offset + self.length if self.length else _NEVER

    @property
    def num_vectors(self) -> int:
        """How many the tower makes of it."""
        return sum(count for _, count in self.runs) if self.runs else self.length

    def places(self) -> list[tuple[int, int]]:
        """The positions in the prompt that have vectors: first, and how many."""
        return [(self.offset + first, count) for first, count in self.runs or [(0, self.length)]]


class Media(msgspec.Struct, omit_defaults=True, eq=False):
    """All that a prompt has beside its tokens."""

    items: list[MediaItem]
    """In order of their spans, which do not overlap."""
    positions: Array | None = None
    """[3, prompt] int32, for models that turn by time, height and width: those of each token. What follows
    the prompt goes on behind the largest."""
    whole: int = 0
    """The first so many tokens see each other in both directions: no step divides them,"""
    whole_key: bytes = b""
    """and what is kept of each stands for all of them, which this tells from others."""

    def joined(self, tokens: Sequence[int]) -> "Media":
        """The same of a prompt whose tokens all see each other."""
        content = np.asarray(tokens, np.int32).tobytes() + self.keys_of(0, len(tokens))
        return msgspec.structs.replace(self, whole=len(tokens), whole_key=sha256(content).digest())

    def num_tokens(self) -> dict[str, int]:
        """Of all spans, by modality."""
        found: dict[str, int] = {}
        for item in self.items:
            found[item.modality] = found.get(item.modality, 0) + item.length
        return found

    def marks(self, tokens: list[int]) -> list[int]:
        """The tokens, and in place of those of items numbers out of their keys: where the like of it went is
        found by them."""
        found = list(tokens)
        for item in self.items:
            (number,) = struct.unpack_from("<I", item.key)
            marks = range(number, number + max(item.length, 1))
            found[item.offset : item.offset + item.length] = marks
        return found

    def keys_of(self, start: int, end: int) -> bytes:
        """What these tokens stand for: the same for the same items at the same places."""
        items, found = self.items, self.whole_key if start < self.whole else b""
        for number in range(bisect_right(items, start, key=lambda item: item.end), len(items)):
            item = items[number]
            if item.offset >= end:
                break
            found += _PLACE.pack(start - item.offset, len(item.key)) + item.key
        return found
