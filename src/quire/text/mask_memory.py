"""Memory of token masks: the tokens that a grammar allows, by the key of a position in the text that other
texts reach, too."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.text.json_states import MaskKey

MAX_BYTES = 32 << 20
"""Maximum bytes of remembered masks; the least recently used ones are dropped."""


class MaskMemory:
    """Remembered token masks by key. It is not thread-safe."""

    def __init__(self, num_words: int, max_bytes: int = MAX_BYTES) -> None:
        self._masks = np.empty((max(max_bytes // (4 * num_words), 1), num_words), np.uint32)
        self._slots: OrderedDict[MaskKey | None, int] = OrderedDict()

    def __contains__(self, key: MaskKey | None) -> bool:
        return key in self._slots

    def allows(self, key: MaskKey | None, token_id: int) -> bool:
        """Whether the mask is remembered and allows the token."""
        slot = self._slots.get(key)
        return slot is not None and bool(int(self._masks[slot, token_id >> 5]) >> (token_id & 31) & 1)

    def copy(self, keys: Sequence[MaskKey | None], rows: list[int], bits: NDArray[np.uint32]) -> list[int]:
        """Copy remembered masks to their rows of `bits`. Return the indices of the keys whose masks are not
        remembered."""
        slots = [self._slots.get(key) for key in keys]
        if len(self._slots) > len(self._masks) // 2:
            for key in keys:
                if key in self._slots:
                    self._slots.move_to_end(key)
        unknown = [index for index, slot in enumerate(slots) if slot is None]
        if not unknown and rows == list(range(len(rows))):
            self._masks.take(np.array(slots), axis=0, out=bits[: len(rows)], mode="clip")
            return unknown
        for row, slot in zip(rows, slots, strict=True):
            if slot is not None:
                bits[row] = self._masks[slot]
        return unknown

    def keep(self, key: MaskKey, mask: NDArray[np.uint32]) -> None:
        """Remember a mask; if the memory is full, it replaces the least recently used one."""
        slot = self._slots.get(key)
        if slot is None:
            is_full = len(self._slots) >= len(self._masks)
            slot = self._slots.popitem(last=False)[1] if is_full else len(self._slots)
            self._slots[key] = slot
        self._masks[slot] = mask
