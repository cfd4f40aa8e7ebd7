"""Media of a prompt: images, videos and audio, as arrays for the encoder."""

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.data.block_hash import PLACE, ExtraKey


class Array(msgspec.Struct, frozen=True, eq=False):
    """A serializable array; bfloat16 is stored as bits in uint16."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    """Bytes of the array; after decoding, a view of the message."""

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> "Array":
        numbers = np.ascontiguousarray(numbers)
        return cls(numbers.dtype.name, numbers.shape, numbers.reshape(-1).view(np.uint8).data)

    def numbers(self) -> NDArray[Any]:
        """Return a read-only numpy array."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


Arrays = dict[str, Array]
"""Arrays by the input names of a family's encoder."""
TABLE = "table"
"""Name of the float32 array [3, 256] with the normalized value of each byte by colour channel, for arrays of
bytes [..., 3, height, width]."""
_NEVER = 1 << 31
pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Arrays).decode
"""Decoder of the arrays of a media item in shared memory, which `pack` has encoded. The decoded arrays are
views of that memory."""
_ITEM_BYTES = 512
"""Estimated bytes of an item besides its arrays."""


def size_of(arrays: Arrays) -> int:
    """Return the size of an item in bytes, as caches count it."""
    return _ITEM_BYTES + sum(array.data.nbytes for array in arrays.values())


class StoredArrays(msgspec.Struct, weakref=True, eq=False):
    """Place of the arrays of an item in shared memory. The arrays stay there as long as this object
    exists."""

    memory: str
    """Path of the shared memory."""
    start: int
    length: int
    generation: int
    """Number that distinguishes the arrays from earlier arrays at this place."""


class MediaItem(msgspec.Struct, omit_defaults=True, kw_only=True, eq=False):
    """One image, video or audio of a prompt, with its span of placeholder tokens."""

    modality: str
    """`image`, `video` or `audio`."""
    key: bytes
    """Cache key: equal for the same content with the same arguments."""
    offset: int
    """Prompt position at which the item's span starts."""
    length: int
    """Number of tokens of the item's span; 0 if all tokens cross-attend to the item instead."""
    runs: list[tuple[int, int]] = []
    """Runs of tokens with encoder vectors: start in the span, and length. Empty: all tokens."""
    arrays: Arrays | None = None
    """Inputs of the encoder. None if the receiver has the inputs cached by key, or they are `stored`."""
    stored: StoredArrays | None = None
    """Place of the arrays in shared memory."""

    @property
    def end(self) -> int:
        """Position after which no token needs the item."""
        return self.offset + self.length if self.length else _NEVER

    @property
    def num_vectors(self) -> int:
        """Return the number of vectors (embeddings) that the encoder computes for the item."""
        return sum(count for _, count in self.runs) if self.runs else self.length

    def places(self) -> list[tuple[int, int]]:
        """Return the runs of prompt positions with encoder vectors: start in the prompt, and length."""
        return [(self.offset + first, count) for first, count in self.runs or [(0, self.length)]]


class Media(msgspec.Struct, omit_defaults=True, eq=False):
    """All media of a prompt."""

    items: list[MediaItem]
    """Items in order of their spans, which do not overlap."""
    positions: Array | None = None
    """M-RoPE positions [3, prompt] of int32 (time, height, width). Output tokens continue after the
    largest."""
    num_bidirectional: int = 0
    """Number of leading prompt tokens that attend to each other in both directions. One step must compute all
    of them."""
    bidirectional_key: bytes = b""
    """Hash of all tokens with bidirectional attention, since the KV block of each depends on all of them."""

    def joined(self, tokens: Sequence[int]) -> "Media":
        """Return a copy of the media for a prompt `tokens` that has bidirectional attention among all of its
        tokens."""
        content = np.asarray(tokens, np.int32).tobytes() + self.keys_of(0, len(tokens))
        return msgspec.structs.replace(
            self, num_bidirectional=len(tokens), bidirectional_key=sha256(content).digest()
        )

    def num_tokens(self) -> dict[str, int]:
        """Return the number of placeholder tokens by modality."""
        counts: dict[str, int] = {}
        for item in self.items:
            counts[item.modality] = counts.get(item.modality, 0) + item.length
        return counts

    def routing_ids(self, tokens: list[int]) -> list[int]:
        """Return the prompt tokens for prefix matching by the router. Numbers from the items' keys replace
        placeholder tokens, so that prompts with different media differ."""
        numbers = list(tokens)
        for item in self.items:
            (number,) = struct.unpack_from("<I", item.key)
            marks = range(number, number + max(item.length, 1))
            numbers[item.offset : item.offset + item.length] = marks
        return numbers

    def keys_of(self, start: int, end: int) -> bytes:
        """Return the media part of the hash input of a range of tokens. It is equal if the same items are at
        the same positions."""
        keys = self.bidirectional_key if start < self.num_bidirectional else b""
        for item in self._overlapping(start, end):
            keys += PLACE.pack(start - item.offset, len(item.key)) + item.key
        return keys

    def extra_keys_of(self, start: int, end: int) -> list[ExtraKey]:
        """Return the parts of `keys_of` as KV events report them."""
        keys: list[ExtraKey] = [self.bidirectional_key] if start < self.num_bidirectional else []
        return keys + [(item.key.hex(), item.offset - start) for item in self._overlapping(start, end)]

    def _overlapping(self, start: int, end: int) -> Iterator[MediaItem]:
        """Yield the items with spans that overlap a range of tokens."""
        items = self.items
        for number in range(bisect_right(items, start, key=lambda item: item.end), len(items)):
            if items[number].offset >= end:
                break
            yield items[number]
