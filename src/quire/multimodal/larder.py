"""Larder: what was made of items, for the next prompt that has them."""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from quire.data.lru import Lru
from quire.data.media import Arrays, Item, Media, size_of
from quire.logs import get_logger
from quire.multimodal.families import Processed

log = get_logger(__name__)
_ID_BYTES = 8
"""What a token takes in a list."""


class Larder:
    """Processed items by key, of one API process. With a far side the arrays are there: the core keeps what
    it is sent in the same order, and what it has is not sent again."""

    def __init__(self, max_bytes: int, *, far: bool = False) -> None:
        self._kept: Lru[tuple[bytes, Processed]] = Lru(max_bytes)
        """With its key, by what it is looked up by: the same, but for items with a uuid."""
        self._far: Lru[None] | None = Lru(max_bytes) if far else None
        """What the core has."""
        self.count: Callable[[int, int], None] = lambda queries, hits: None
        """Told of items that were asked for, and of those that were there."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def find(self, name: bytes) -> tuple[bytes, Processed] | None:
        """The key of an item and what was made of it: without arrays, if those are on the far side."""
        if not self._kept.max_bytes:
            return None
        found = self._kept.get(name)
        if found is not None and self._far is not None and found[0] not in self._far:
            found = None
        self.count(1, found is not None)
        return found

    def keep(self, name: bytes, key: bytes, processed: Processed) -> None:
        num_bytes = size_of(processed.arrays or {}) + _ID_BYTES * len(processed.token_ids)
        kept = processed if self._far is None else replace(processed, arrays=None)
        if not self._kept.put(name, (key, kept), num_bytes) and self._kept.max_bytes:
            log.warning(
                "An item of %.1f MiB is larger than mm_processor_cache_gb (%.3f GiB), and is not kept",
                num_bytes / 2**20,
                self._kept.max_bytes / 2**30,
            )

    def clear(self) -> None:
        self._kept.clear()
        self.forget_far()

    # ---- the far side

    def forget_far(self) -> None:
        """It may have nothing any more. What it still has is older than all that it is sent from now on, so
        that it goes first there, and never too early."""
        if self._far is not None:
            self._far.clear()

    def lacks(self, media: Media) -> bool:
        """Whether there is an item that neither is here nor there."""
        return any(item.arrays is None and not self._is_far(item.key) for item in media.items)

    def _is_far(self, key: bytes) -> bool:
        return self._far is not None and key in self._far

    def outgoing(self, media: Media, *, whole: bool = False) -> Media:
        """As it is sent to the core: without arrays that it has, unless it is to have the `whole`."""
        if self._far is None:
            return media
        brought: dict[bytes, Arrays] = {}
        sent: list[Item] = []
        for item in media.items:
            arrays = item.arrays
            if item.key in brought:
                arrays = None
            elif arrays is not None and (whole or item.key not in self._far):
                brought[item.key] = arrays
            else:
                assert item.key in self._far, "an item that nobody has"
                self._far.get(item.key)
                arrays = None
            sent.append(msgspec.structs.replace(item, arrays=arrays))
        for key, arrays in brought.items():
            self._far.put(key, None, size_of(arrays))
        return Media(sent, media.positions)
