"""ReceiverCache: multimodal arrays sent to an engine core, kept for later requests with the same items."""

from collections.abc import Callable

from quire.data.lru import Lru
from quire.data.multimodal import Array, Arrays, Media, StoredArrays, size_of

_MAX_SLACK = 1.25
"""Ratio of message size to array size above which an array is copied out of its message, so that the message
can be freed."""


class ReceiverCache:
    """Cache of multimodal input arrays in the engine core. It keeps and evicts the same items in the same
    order as the sender cache of the API server process. Arrays in shared memory are not copied."""

    def __init__(
        self, max_bytes: int = 0, take: Callable[[StoredArrays], bool] = lambda stored: False
    ) -> None:
        """Build a cache of at most `max_bytes` bytes. `take` keeps arrays in shared memory alive while they
        are used; it returns False if the arrays are gone."""
        self._kept: Lru[Arrays] = Lru(max_bytes)
        self._take = take
        self.num_resets = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def fill(self, media: Media | None) -> bool:
        """Set the arrays of items that were sent without them, because an earlier message had them. Return
        False if some are missing; the client then sends the request again with all arrays."""
        if media is None:
            return True
        sent = {item.key: item.arrays for item in media.items if item.arrays is not None}
        for item in media.items:
            if item.stored is not None:
                if not self._take(item.stored):
                    return False
            elif item.arrays is None:
                item.arrays = sent.get(item.key) or self._kept.get(item.key)
                if item.arrays is None:
                    return False
        if self._kept.max_bytes:
            for key, arrays in sent.items():
                self._kept.put(key, _detach(arrays), size_of(arrays))
        return True

    def clear(self) -> bool:
        self._kept.clear()
        self.num_resets += 1
        return True


def _detach(arrays: Arrays) -> Arrays:
    """Copy arrays out of their message if the message is much larger, since a view would keep the whole
    message in memory."""
    return {
        name: Array(array.dtype, array.shape, memoryview(bytes(array.data))) if _is_part(array) else array
        for name, array in arrays.items()
    }


def _is_part(array: Array) -> bool:
    message = array.data.obj
    return isinstance(message, bytes | bytearray) and len(message) > _MAX_SLACK * array.data.nbytes
