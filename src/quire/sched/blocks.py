"""Entries of the prefix cache: reference counts, the free list and the index.

An entry is a `Block`. It contains the KV of consecutive tokens in one group of layers, or the SSM states of
all layers after a prefix. A `BlockPool` has all entries of one of these kinds on one device. Pools may share
an index, in which the key of an entry identifies its prefix and its kind."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

SALTED = b"salt"
"""Suffix of the keys of blocks that belong to requests with a cache salt; the mark of the layer group follows
it."""


class Block:
    """A KV block, or a slot for SSM states. Free blocks are linked in the order in which they will be
    reused."""

    __slots__ = ("id", "key", "next", "num_users", "prev")

    def __init__(self, id: int) -> None:
        self.id = id
        self.num_users = 0
        self.key: bytes | None = None
        """Key of the prefix that ends with this block; None while it is partly filled or not indexed."""
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.id}, users={self.num_users}, key={self.key.hex()[:8] if self.key else None})"


class FreeList:
    """A linked list of blocks. The time of an operation does not depend on the length of the list."""

    def __init__(self) -> None:
        self._head, self._tail = Block(-1), Block(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    @property
    def first(self) -> Block | None:
        """Return the first block; None if the list is empty."""
        return self._head.next if self._len else None

    def _link(self, before: Block, block: Block, after: Block) -> None:
        before.next = after.prev = block
        block.prev, block.next = before, after
        self._len += 1

    def append(self, block: Block) -> None:
        assert self._tail.prev is not None
        self._link(self._tail.prev, block, self._tail)

    def prepend(self, block: Block) -> None:
        assert self._head.next is not None
        self._link(self._head, block, self._head.next)

    def remove(self, block: Block) -> None:
        before, after = block.prev, block.next
        assert before is not None and after is not None, f"{block} is not free"
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._len -= 1

    def take(self, count: int) -> list[Block]:
        """Remove and return the first `count` blocks; the list must hold at least that many."""
        taken, block = [], self._head.next
        for _ in range(count):
            assert block is not None and block is not self._tail, "no free block"
            taken.append(block)
            after, block.prev, block.next = block.next, None, None
            block = after
        assert block is not None
        self._head.next, block.prev = block, self._head
        self._len -= count
        return taken


class BlockPool:
    """All entries of one kind: KV blocks, or slots for SSM states. Block 0 is never allocated: padding may
    read and write it."""

    def __init__(self, num_blocks: int, index: dict[bytes, Block] | None = None) -> None:
        """Build the pool of `num_blocks` entries. `index` maps keys to entries; it may be shared with other
        pools if their keys differ."""
        assert num_blocks >= 2, num_blocks
        self.blocks = [Block(id) for id in range(num_blocks)]
        self.blocks[0].num_users = 1
        self._free = FreeList()
        for block in self.blocks[1:]:
            self._free.append(block)
        self.index: dict[bytes, Block] = {} if index is None else index
        self.on_evict: Callable[[list[Block]], None] = lambda blocks: None
        """Function that is called with blocks before their prefixes are evicted; their contents are still
        valid then."""
        self.num_taken = 0
        """Number of blocks that were ever allocated."""

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - self.num_free / self.num_usable

    def take(self, count: int) -> list[Block]:
        """Allocate `count` free blocks and evict their prefixes from the index. No other method evicts
        prefixes."""
        assert count <= self.num_free, f"{count} blocks needed, {self.num_free} free"
        taken, evicted = self._free.take(count), list[Block]()
        self.num_taken += count
        for block in taken:
            block.num_users = 1
            if block.key is not None:
                evicted.append(block)
        if evicted:
            self.on_evict(evicted)
            for block in evicted:
                self.forget(block)
        return taken

    def next_free(self, count: int) -> list[Block]:
        """Return up to `count` free blocks that will be allocated first."""
        return list(islice(self._free, count))

    def share(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.num_users == 0:
                self._free.remove(block)
            block.num_users += 1

    def release(self, blocks: list[Block]) -> None:
        """Release the blocks of one sequence, given in token order. Of those that become free, the last
        blocks will be allocated again before the first ones, since the beginning of a sequence is more likely
        to be shared. Blocks without an indexed prefix are allocated again before all others."""
        for block in reversed(blocks):
            block.num_users -= 1
            assert block.num_users >= 0, f"{block} was freed twice"
            if block.num_users == 0:
                (self._free.prepend if block.key is None else self._free.append)(block)

    def find(self, key: bytes) -> Block | None:
        return self.index.get(key)

    def remember(self, block: Block, key: bytes) -> None:
        """Index a full block. A second block with the same content stays out of the index."""
        if self.index.setdefault(key, block) is block:
            block.key = key

    def forget(self, block: Block) -> None:
        if block.key is not None:
            del self.index[block.key]
            block.key = None

    def block_map(self, max_cells: int = 2048) -> bytes:
        """Return the state of the pool, one byte per cell: 0 free, 1 free with a prefix, 2 in use, 3 shared.
        If there are more blocks than cells, a cell shows the busiest of its blocks."""
        states = [
            min(block.num_users + 1, 3) if block.num_users else int(block.key is not None)
            for block in self.blocks[1:]
        ]
        per_cell = -(-len(states) // max_cells)
        return bytes(max(states[start : start + per_cell]) for start in range(0, len(states), per_cell))

    def reset(self) -> bool:
        """Forget every prefix. Return False and do nothing while blocks are in use."""
        if self.num_free != self.num_usable:
            return False
        for block in self.blocks:
            self.forget(block)
        return True
