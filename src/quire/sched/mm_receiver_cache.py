"""Pantry: the arrays of items that were sent to a core, for the next request with the same."""

from collections.abc import Callable

from quire.data.lru import Lru
from quire.data.multimodal import Array, Arrays, Media, StoredArrays, size_of

_SPARE = 1.25
"""A message may be as many times as large as the item that is kept in it."""


class ReceiverCache:
    """The far side of an API process's larder: what it is sent it keeps, and loses in the same order. What
    is in shared memory stays there."""

    def __init__(
        self, max_bytes: int = 0, take: Callable[[StoredArrays], bool] = lambda stored: False
    ) -> None:
        """`take` keeps what is there as it is until nobody refers to it; False: it cannot be had."""
        self._kept: Lru[Arrays] = Lru(max_bytes)
        self._take = take
        self.num_resets = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def fill(self, media: Media | None) -> bool:
        """Give items the arrays that were sent before. False: some are not here, and the request has to come
        again with them."""
        if media is None:
            return True
        brought = {item.key: item.arrays for item in media.items if item.arrays is not None}
        for item in media.items:
            if item.stored is not None:
                if not self._take(item.stored):
                    return False
            elif item.arrays is None:
                item.arrays = brought.get(item.key) or self._kept.get(item.key)
                if item.arrays is None:
                    return False
        if self._kept.max_bytes:
            for key, arrays in brought.items():
                self._kept.put(key, _own(arrays), size_of(arrays))
        return True

    def clear(self) -> bool:
        self._kept.clear()
        self.num_resets += 1
        return True


def _own(arrays: Arrays) -> Arrays:
    """Out of the message that they came in, if that is much larger."""
    return {
        name: Array(each.dtype, each.shape, memoryview(bytes(each.data))) if _is_part(each) else each
        for name, each in arrays.items()
    }


def _is_part(array: Array) -> bool:
    message = array.data.obj
    return isinstance(message, bytes | bytearray) and len(message) > _SPARE * array.data.nbytes
