"""Embeds: the vectors of a prompt, which stand in place of token ids."""

import hashlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16

Rows = NDArray[Any]
"""[tokens, hidden] of float32 or float16; numbers of bfloat16 as their bits."""


class PromptEmbeds(msgspec.Struct, frozen=True, eq=False):
    """A vector for each token of a prompt, as it goes into the first layer."""

    dtype: str
    """float32 | float16 | bfloat16"""
    hidden: int
    data: bytes
    """[tokens, hidden], row by row."""
    keys: bytes
    """KEY_BYTES for each vector, the same for the same ones: what the prefix cache knows them by."""

    @classmethod
    def of(cls, dtype: str, rows: Rows) -> "PromptEmbeds":
        rows = np.ascontiguousarray(rows)
        person = dtype.encode()  # the same bits are other numbers in another type
        keys = (hashlib.blake2b(row, digest_size=KEY_BYTES, person=person).digest() for row in rows)
        return cls(dtype, rows.shape[1], rows.tobytes(), b"".join(keys))

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def keys_of(self, start: int, end: int) -> bytes:
        return self.keys[start * KEY_BYTES : end * KEY_BYTES]

    def rows(self, start: int, end: int) -> bytearray:
        """Those vectors' numbers."""
        row_bytes = len(self.data) // len(self)
        return bytearray(memoryview(self.data)[start * row_bytes : end * row_bytes])

    def marks(self) -> list[int]:
        """A number for each vector, as a token has its id: where the like of it went is found by them."""
        marks: list[int] = (np.frombuffer(self.keys, np.uint64)[::2] >> np.uint64(32)).tolist()
        return marks
