"""Retention of blocks that clients hint at: they are evicted after all other blocks, for a limited time."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from quire.data.cache_hints import CacheHints
from quire.sched.blocks import Block, BlockPool, FreeList

MAX_SHARE = 1 / 2
"""Maximum fraction of a pool that is retained for all hints together."""
MAX_NAME_SHARE = 1 / 4
"""Maximum fraction of a pool that is retained for one session or `prompt_cache_key`."""
_EXPIRY_S = 1.0
"""Seconds between two searches for blocks with expired retention."""


class RetainingPool(BlockPool):
    """A pool that reuses free blocks in this order: blocks without a prefix, blocks with expired retention
    (their session has ended), other blocks by last use, retained blocks by last use of their session.

    Only free blocks are retained: a block in use needs no protection. The limits are shares of the pool. If
    all hints together exceed their limit, the scope with the most blocks loses some first, so that no API key
    can take the retention of the others."""

    def __init__(
        self,
        num_blocks: int,
        index: dict[bytes, Block] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_blocks, index)
        self._clock = clock
        self._max_retained = int(MAX_SHARE * self.num_usable)
        self._max_of_name = int(MAX_NAME_SHARE * self.num_usable)
        self._retained: OrderedDict[CacheHints, FreeList] = OrderedDict()
        """Free blocks by hints; blocks and hints are in the order of their last use."""
        self._until: dict[Block, tuple[CacheHints, float]] = {}
        """Hints of each block, free or in use, that was retained, and the end of its retention."""
        self._num_by_scope: dict[str, int] = {}
        self._next_expiry = 0.0
        self.num_retained = 0

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_retained

    def take(self, count: int) -> list[Block]:
        if self._retained:
            self._reclaim(count)
        taken = super().take(count)
        if self._until:
            for block in taken:
                self._until.pop(block, None)
        return taken

    def share(self, blocks: Iterable[Block]) -> None:
        if self.num_retained:
            blocks = list(blocks)
            for block in blocks:
                if block.num_users == 0 and block in self._until:
                    self._drop(block)
                    self._free.append(block)  # the base class removes it from there
        super().share(blocks)

    def release(self, blocks: list[Block], hints: CacheHints | None = None) -> None:
        """Release the blocks of one sequence, in its order, and retain the first of them if there are
        hints. A block that was retained before stays retained until its time is over."""
        super().release(blocks)
        if hints is None and not self._until:
            return
        now = self._clock()
        num_hinted = 0 if hints is None else self._max_of_name
        for at in range(len(blocks) - 1, -1, -1):
            block = blocks[at]
            named, until = self._until.get(block, (None, 0.0))
            if hints is not None and at < num_hinted and until < now + hints.retention_s:
                named, until = hints, now + hints.retention_s
            if named is None or block.key is None:
                continue
            if until <= now:
                del self._until[block]
                continue
            self._until[block] = named, until
            if not block.num_users:
                self._free.remove(block)
                self._retain(block, named)

    def reset(self) -> bool:
        if not super().reset():
            return False
        while self._retained:
            self._demote(next(iter(self._retained)))
        self._until.clear()
        return True

    def _retain(self, block: Block, hints: CacheHints) -> None:
        """Add a free block to the list of its hints, within the limits."""
        if (blocks := self._retained.get(hints)) is None:
            blocks = self._retained[hints] = FreeList()
        blocks.append(block)
        self._retained.move_to_end(hints)
        self.num_retained += 1
        self._num_by_scope[hints.scope] = self._num_by_scope.get(hints.scope, 0) + 1
        if len(blocks) > self._max_of_name:
            self._demote(hints)
        elif self.num_retained > self._max_retained:
            scope = max(self._num_by_scope, key=lambda name: self._num_by_scope[name])
            self._demote(next(key for key in self._retained if key.scope == scope))

    def _drop(self, block: Block) -> None:
        """Remove a retained block from its list, and the list if it is empty."""
        hints, _ = self._until[block]
        self._retained[hints].remove(block)
        if not self._retained[hints]:
            del self._retained[hints]
        self.num_retained -= 1
        self._num_by_scope[hints.scope] -= 1
        if not self._num_by_scope[hints.scope]:
            del self._num_by_scope[hints.scope]

    def _demote(self, hints: CacheHints) -> None:
        """Move the least recently used block with these hints to the end of the free list."""
        block = self._retained[hints].first
        assert block is not None
        self._drop(block)
        del self._until[block]
        self._free.append(block)

    def _reclaim(self, count: int) -> None:
        """Move retained blocks to the free list, if needed, so that `count` blocks can be taken from its
        beginning."""
        first = self._free.first
        if len(self._free) >= count and first is not None and first.key is None:
            return  # nothing is evicted
        if (now := self._clock()) >= self._next_expiry:
            self._next_expiry = now + _EXPIRY_S
            self._expire(now)
        while len(self._free) < count:
            self._demote(next(iter(self._retained)))

    def _expire(self, now: float) -> None:
        """Move blocks with expired retention to the beginning of the free list."""
        expired: list[Block] = []
        for blocks in list(self._retained.values()):
            while (block := blocks.first) is not None and self._until[block][1] <= now:
                self._drop(block)
                del self._until[block]
                expired.append(block)
        for block in reversed(expired):
            self._free.prepend(block)
