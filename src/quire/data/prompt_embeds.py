"""Prompt embeddings, which requests may send in place of token ids."""

import hashlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16

Rows = NDArray[Any]
"""Array [tokens, hidden] of float32 or float16; bfloat16 as bits in uint16."""


class PromptEmbeds(msgspec.Struct, frozen=True, eq=False):
    """Input embedding of the first layer for each token of a prompt."""

    dtype: str
    """float32 | float16 | bfloat16"""
    hidden: int
    data: bytes
    """Bytes of [tokens, hidden]."""
    keys: bytes
    """Concatenated hashes of the vectors, KEY_BYTES each, for the prefix cache."""

    @classmethod
    def of(cls, dtype: str, rows: Rows) -> "PromptEmbeds":
        rows = np.ascontiguousarray(rows)
        person = dtype.encode()  # equal bits of another dtype have another hash
        keys = (hashlib.blake2b(row, digest_size=KEY_BYTES, person=person).digest() for row in rows)
        return cls(dtype, rows.shape[1], rows.tobytes(), b"".join(keys))

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def keys_of(self, start: int, end: int) -> bytes:
        return self.keys[start * KEY_BYTES : end * KEY_BYTES]

    def rows(self, start: int, end: int) -> bytearray:
        """Return the bytes of the vectors from `start` to `end`."""
        row_bytes = len(self.data) // len(self)
        return bytearray(memoryview(self.data)[start * row_bytes : end * row_bytes])

    def routing_ids(self) -> list[int]:
        """Return a number for each vector in place of a token id, for prefix matching by the router."""
        ids: list[int] = (np.frombuffer(self.keys, np.uint64)[::2] >> np.uint64(32)).tolist()
        return ids
