"""KVManager: which blocks each row holds, and which prefixes can be shared."""

import hashlib
from collections.abc import Iterable

import numpy as np

from quire.data.plan import Ints
from quire.data.request import Request
from quire.sched.blocks import Block, BlockPool
from quire.sched.running import RowIds, Running

_NONE: Ints = np.empty(0, np.int32)


def _root_key(request: Request) -> bytes:
    """The parent of a request's first block: everything beside its tokens that its cache depends on."""
    return hashlib.sha256(
        b"" if request.cache_salt is None else b"salt:" + request.cache_salt.encode()
    ).digest()


class KVManager:
    """The blocks of each of the scheduler's rows, in the order of its tokens, and the prefixes they share."""

    def __init__(self, *, num_blocks: int, block_size: int, max_rows: int, share_prefixes: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.tables: list[list[Block]] = [[] for _ in range(max_rows)]
        self.num_blocks: Ints = np.zeros(max_rows, np.int32)
        self.num_indexed: Ints = np.zeros(max_rows, np.int32)
        self._fresh: list[Block] = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def may_share(self, request: Request) -> bool:
        """Whether a request may read blocks that others have computed."""
        return self.share_prefixes and not request.params.skip_reading_prefix_cache

    def lookup(self, request: Request) -> list[Block]:
        """The longest indexed prefix. The last token is never part of it: its logits have to be computed."""
        if not self.may_share(request):
            return []
        hits = []
        num_full = (len(request.tokens) - 1) // self.block_size
        if len(request.block_keys) < num_full:
            self._hash(request, np.array(request.tokens, np.int32), num_full)
        for key in request.block_keys[:num_full]:
            block = self.pool.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_takable(self, hits: list[Block]) -> int:
        """Free blocks that remain once `hits` are in use."""
        return self.pool.num_free - sum(block.num_users == 0 for block in hits)

    def admit(self, row: int, hits: list[Block], num_tokens: int) -> list[int]:
        """Give an empty row its shared blocks and new ones up to `num_tokens`; their ids."""
        assert not self.tables[row], f"row {row} is taken"
        self.pool.share(hits)
        table = hits + self.pool.take(self.blocks_for(num_tokens) - len(hits))
        self.tables[row] = table
        self.num_blocks[row] = len(table)
        self.num_indexed[row] = len(hits)
        return [block.id for block in table]

    def grow(self, rows: RowIds, counts: Ints) -> tuple[Ints, Ints]:
        """Append `counts[i]` new blocks to `rows[i]`. Returns row and id of each new block."""
        growing = np.flatnonzero(counts)
        if not len(growing):
            return _NONE, _NONE
        rows, counts = rows[growing], counts[growing]
        self.num_blocks[rows] += counts
        block_rows = np.repeat(rows.astype(np.int32), counts)
        taken = self.pool.take(len(block_rows))
        for row, block in zip(block_rows.tolist(), taken, strict=True):
            self.tables[row].append(block)
        return block_rows, np.array([block.id for block in taken], np.int32)

    def index(self, running: Running, rows: RowIds, chunks: Ints) -> None:
        """Make the blocks findable that the next `chunks[i]` tokens of `rows[i]` fill, if it is known with
        what. That is before they are filled: who shares them reads after the write."""
        if not self.share_prefixes:
            return
        reach = np.minimum(running.num_computed[rows] + chunks, running.num_known[rows])
        num_full, num_indexed = reach // self.block_size, self.num_indexed[rows]
        filled = np.flatnonzero(num_full > num_indexed)
        if not len(filled):
            return
        rows, num_indexed, num_full = rows[filled], num_indexed[filled], num_full[filled]
        for row, first, end in zip(rows.tolist(), num_indexed.tolist(), num_full.tolist(), strict=True):
            request, table = running.request(row), self.tables[row]
            keys = request.block_keys
            if len(keys) < end:
                self._hash(request, running.tokens[row], end)
            for at in range(first, end):
                self.pool.remember(table[at], keys[at])
                self._fresh.append(table[at])
        self.num_indexed[rows] = num_full

    def take_fresh(self) -> list[Block]:
        """The blocks that were indexed since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def forget(self, blocks: Iterable[Block]) -> None:
        """These were not written after all."""
        for block in blocks:
            self.pool.forget(block)

    def free(self, row: int) -> None:
        self.pool.release(self.tables[row])
        self.tables[row] = []
        self.num_blocks[row] = self.num_indexed[row] = 0

    def _hash(self, request: Request, tokens: Ints, num_full: int) -> None:
        """Extend the request's keys to its first `num_full` blocks; each is hashed once in a request's
        life."""
        keys, size = request.block_keys, self.block_size
        parent = keys[-1] if keys else _root_key(request)
        for start in range(len(keys) * size, num_full * size, size):
            parent = hashlib.sha256(parent + tokens[start : start + size].tobytes()).digest()
            keys.append(parent)
