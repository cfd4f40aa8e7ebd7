"""KVManager: the block tables of the rows, and the prefix cache."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quire.checkpoint.layout import most_blocks
from quire.data.block_hash import DIGEST_BYTES, block_hash, root_hash
from quire.data.kv_tiers import STATE_MARK, BlockStores
from quire.data.prefix_miss import PrefixMiss
from quire.data.request import Request
from quire.data.stats import TierStats
from quire.data.step_plan import Ints
from quire.sched.admission_checks import AdmissionCheck
from quire.sched.blocks import SALTED, Block
from quire.sched.kv_events import KVEvents
from quire.sched.miss_reasons import MissReasons
from quire.sched.retention import RetainingPool
from quire.sched.running import RowIds, Running
from quire.sched.state_cache import StateCache
from quire.sched.tier_protocol import LowerTiers

_NONE: Ints = np.empty(0, np.int32)
_NO_SAVES: Ints = np.empty((3, 0), np.int32)
_MAX_TOKENS = 1 << 30
"""Number of tokens that stands for "no limit"."""

Table = list[Block | None]
Find = Callable[[bytes], Block | None]


class Hit(NamedTuple):
    """A prefix cache hit: the longest cached prefix of a request."""

    num_tokens: int
    blocks: list[Table]
    """Block tables by layer group. None: the block is before the sliding window, or no layer has pages."""
    num_seen: int = 0
    """Number of tokens with cached KV pages, above `num_tokens` if no SSM checkpoint follows them."""


class Growth(NamedTuple):
    """The blocks that rows need for more tokens."""

    lengths: Ints
    """Number of tokens that each row will have."""
    rows: RowIds
    """The rows that need blocks."""
    counts: Ints
    """Number of new blocks that each of these rows needs in every layer group."""
    shortage: int
    """Number of blocks needed beyond the free ones; 0 if the free blocks suffice."""


def _root_key(request: Request) -> bytes:
    """Return the parent key of the first block, which depends on the LoRA adapter and the cache salt."""
    return root_hash(request.adapter_digest if request.lora is not None else None, request.cache_salt)


def is_salted(key: bytes) -> bool:
    """Whether the key of a block belongs to requests with a cache salt."""
    return key.startswith(SALTED, DIGEST_BYTES)


def _held(table: Table) -> list[Block]:
    return [block for block in table if block is not None]


class KVManager:
    """The block tables of the rows (running requests), in token order, and the prefixes that they share.

    Layers with the same window form a group, and a row has one table per group. With a sliding window a row
    releases the blocks that no later token attends to."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        share_prefixes: bool,
        windows: Sequence[int | None] = (None,),
        max_chunk: int = _MAX_TOKENS,
        states: StateCache | None = None,
        has_pages: bool = True,
        off_reason: str = "",
    ) -> None:
        """Build the tables. `windows` has the attention window of each group, including the token itself;
        None: no window. `states` is needed to share prefixes of a model with SSM states. Without `has_pages`
        (paged KV) a prefix is restored from states alone. `off_reason` is the reason not to share
        prefixes."""
        self.states = states
        self.has_pages = has_pages
        self.pool = RetainingPool(num_blocks, None if states is None else states.pool.index)
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.windows = tuple(windows)
        self.tables: list[list[Table]] = [[[] for _ in range(max_rows)] for _ in windows]
        """By layer group and row; a row's tables are equally long. None: released behind the window."""
        self.capacity: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens that the tables of each row can hold."""
        self.num_indexed: Ints = np.zeros(max_rows, np.int32)
        self._released = {window: np.zeros(max_rows, np.int32) for window in windows if window is not None}
        """By window: number of blocks that each row has released."""
        sizes = {"block_size": block_size, "max_chunk": max_chunk}
        self._max_blocks = [most_blocks(_MAX_TOKENS, window, **sizes) for window in windows]
        """The most blocks that a row can hold in each group."""
        self.marks = [bytes([group] if group else []) for group in range(len(windows))]
        """Suffixes of block keys, one per layer group, so that the keys of the groups differ."""
        self._groups = list(zip(self.tables, self.marks, strict=True))
        self._newly_indexed: list[Block] = []
        self.tiers: LowerTiers | None = None
        """Lower tiers of the cache, in host memory and on disk."""
        self.events: KVEvents | None = None
        """Events of the cache for subscribers; None without subscribers."""
        self.reasons = MissReasons(
            num_blocks=num_blocks,
            block_size=block_size,
            root_key=_root_key,
            marks=self.marks,
            unit=None if states is None else states.unit,
            off_reason="" if share_prefixes else off_reason or "enable_prefix_caching is off",
        )
        for pool in (self.pool, *([] if states is None else [states.pool])):
            pool.on_evict = self._note_evicted

    # ---- admitting and freeing rows

    def may_share(self, request: Request) -> bool:
        """Whether a request may reuse cached blocks of other requests."""
        return self.share_prefixes and not request.params.skip_reading_prefix_cache

    def lookup(self, request: Request, find: Find | None = None) -> Hit:
        """Return the longest cached prefix of a request: its KV pages in all groups of layers, and if the
        model has SSM states, their checkpoint. It excludes the last token, whose logits have to be computed.
        `find` returns the page with a key; by default those on the device are found."""
        find = find or self.pool.find
        if not self.may_share(request):
            return Hit(0, [[] for _ in self.windows])
        length = (len(request.tokens) - 1) // self.block_size
        if len(request.block_keys) < length:
            self._hash(request, np.array(request.tokens, np.int32), length)
        keys, whole = request.block_keys, {}
        for group, window in enumerate(self.windows):
            if window is None:
                whole[group] = self._longest(keys[:length], self.marks[group], find)
                length = len(whole[group]) if self.has_pages else length
        length = self._longest_in_windows(keys, length, find)
        num_seen = length if self.has_pages else max(map(len, whole.values()), default=0)
        before = -1
        while self.states is not None and before != length:
            before = length
            length = self._longest_in_windows(keys, self.states.longest(keys, length, find), find)
        blocks = [
            whole[group][:length] + [None] * (length - len(whole[group]))
            if window is None
            else self._blocks_in_window(keys[:length], window, self.marks[group], find)
            for group, window in enumerate(self.windows)
        ]
        return Hit(length * self.block_size, blocks, num_seen * self.block_size)

    def state_key(self, request: Request, hit: Hit) -> bytes | None:
        """Return the key of the SSM state checkpoint that a request starts from; None: it needs none."""
        if self.states is None or not hit.num_tokens:
            return None
        return request.block_keys[hit.num_tokens // self.block_size - 1] + STATE_MARK

    def explain(self, request: Request, hit: Hit) -> PrefixMiss | None:
        """Return why a request's cache hit is not longer; None if it has all blocks that a hit can have."""
        return self.reasons.explain(request, hit.num_tokens, hit.num_seen)

    def _note_evicted(self, blocks: list[Block]) -> None:
        self.reasons.evicted([block.key for block in blocks if block.key is not None])
        if self.events is not None:
            self.events.forgotten(blocks)
        if self.tiers is not None:
            self.tiers.note_evicted(blocks)

    def num_created(self, request: Request, hit: Hit) -> int:
        """Return how many prompt tokens a request adds to the prefix cache beyond those of its hit."""
        full = request.prompt_len // self.block_size * self.block_size
        return max(full - hit.num_tokens, 0) if self.share_prefixes else 0

    def _longest(self, keys: list[bytes], mark: bytes, find: Find) -> Table:
        hits: Table = []
        for key in keys:
            if (block := find(key + mark)) is None:
                break
            hits.append(block)
        return hits

    def _longest_in_windows(self, keys: list[bytes], length: int, find: Find) -> int:
        """Return the longest prefix, in blocks and up to `length`, that is cached in all windowed groups."""
        before = -1
        while before != length:
            before = length
            for mark, window in zip(self.marks, self.windows, strict=True):
                if window is not None:
                    length = self._longest_in_window(keys, length, window, mark, find)
        return length

    def _longest_in_window(self, keys: list[bytes], length: int, window: int, mark: bytes, find: Find) -> int:
        """Return the largest number of leading blocks, up to `length`, after which all blocks inside the
        sliding window of the next token are cached."""
        at = length
        while at > self._num_outside(length * self.block_size, window):
            at -= 1
            if find(keys[at] + mark) is None:
                length = at
        return length

    def _blocks_in_window(self, keys: list[bytes], window: int, mark: bytes, find: Find) -> Table:
        num_outside = self._num_outside(len(keys) * self.block_size, window)
        return [None] * num_outside + [find(key + mark) for key in keys[num_outside:]]

    def _num_outside(self, num_computed: int, window: int) -> int:
        """Return the number of leading blocks before the sliding window of the next token."""
        return max(num_computed - window + 1, 0) // self.block_size

    def fits(self, hit: Hit, num_tokens: int, running: Running, spare: int) -> bool:
        """Whether a request with this hit can be admitted with blocks for `num_tokens`. Blocks for the known
        tokens of running rows, one more block for each row, and `spare` blocks stay reserved."""
        needed = self._num_reserved(running) + spare if len(running) else 0
        num_blocks = -(-num_tokens // self.block_size)
        for table, max_blocks in zip(hit.blocks, self._max_blocks, strict=True):
            held = _held(table)
            needed += min(num_blocks - len(table) + len(held), max_blocks) - len(held)
            needed += sum(block.num_users == 0 for block in held)
        return needed <= self.pool.num_free

    def _num_reserved(self, running: Running) -> int:
        rows, size, num = running.order, self.block_size, 0
        num_blocks, needed = self.capacity[rows] // size, -(-running.num_tokens[rows] // size) + 1
        for window, max_blocks in zip(self.windows, self._max_blocks, strict=True):
            released = 0 if window is None else self._released[window][rows]
            num += int((np.minimum(needed - released, max_blocks) - num_blocks + released).clip(0).sum())
        return num

    def cut(self, request: Request, hit: Hit, chunk: int) -> int:
        """Return how many of `chunk` tokens after the hit a request computes in its first step, which may not
        go beyond the first checkpoint of SSM states."""
        if self.states is None or not (ends := self._boundaries(request, hit)):
            return chunk
        return min(chunk, ends[-1] - hit.num_tokens)

    def _boundaries(self, request: Request, hit: Hit) -> list[int]:
        """Return the token positions after which SSM states of a request are stored. A step may not end
        inside of a bidirectional prompt, or of a media item that is not divided."""
        assert self.states is not None
        ends = self.states.boundaries(len(request.tokens), hit.num_tokens, hit.num_seen)
        if (media := request.media) is None:
            return ends
        items = media.items if self.states.whole_items else ()
        spans = [(0, media.num_bidirectional), *((item.offset, item.end) for item in items)]
        return [end for end in ends if not any(first < end < behind for first, behind in spans)]

    def is_checkpoint_planned(self, request: Request, hit: Hit) -> bool:
        """Whether the planned step takes an SSM state checkpoint after a longer prefix than the hit."""
        if self.states is None or not self.may_share(request):
            return False
        return self.states.is_checkpoint_planned(request.block_keys, hit.num_tokens, len(request.tokens) - 1)

    def start(self, row: int, request: Request, hit: Hit) -> int:
        """Report the blocks that an admitted row reuses to KV event subscribers, and set the boundaries of
        its checkpoints. Return the slot of the SSM states that the row starts from; 0: no states."""
        num_blocks = hit.num_tokens // self.block_size
        if self.events is not None:
            self.events.reused(request, hit.blocks, 0 if self.states is None else num_blocks)
        if self.states is None:
            return 0
        self.states.admit(row, self._boundaries(request, hit))
        return self.states.use(request.block_keys[num_blocks - 1], request.hints) if num_blocks else 0

    def admit(self, row: int, hit: Hit, num_tokens: int) -> list[list[int]]:
        """Assign an empty row the blocks of its hit, and new ones for `num_tokens` in all. Return the block
        ids of each layer group; 0 stands for a released block."""
        for table in hit.blocks:
            self.pool.share(_held(table))
        num_blocks = -(-num_tokens // self.block_size)
        block_ids = []
        for tables, hits in zip(self.tables, hit.blocks, strict=True):
            assert not tables[row], f"row {row} is taken"
            tables[row] = table = [*hits, *self.pool.take(num_blocks - len(hits))]
            block_ids.append([0 if block is None else block.id for block in table])
        self.capacity[row] = num_blocks * self.block_size
        self.num_indexed[row] = hit.num_tokens // self.block_size
        for window, num_released in self._released.items():
            num_released[row] = self._num_outside(hit.num_tokens, window)
        return block_ids

    def num_held(self, rows: RowIds) -> Ints:
        """Return the number of blocks in each row's table, including shared and released blocks."""
        held: Ints = -(-self.capacity[rows] // self.block_size)
        return held

    def free(self, row: int, running: Running) -> None:
        request = running.request(row)
        if self.share_prefixes:
            first, end = int(running.num_cached[row]) // self.block_size, int(self.num_indexed[row])
            self.reasons.learn(request, running.tokens[row], first, end)
        for tables in self.tables:
            self.pool.release(_held(tables[row]), request.hints)
            tables[row] = []
        if self.states is not None:
            self.states.free(row)
        self.capacity[row] = self.num_indexed[row] = 0
        for num_released in self._released.values():
            num_released[row] = 0

    # ---- growing rows

    def slide(self, running: Running) -> None:
        """Release the blocks outside the window of each row's next token. A step in flight may still read
        them: steps run in order, so the next owner writes to them in a later step."""
        rows = running.order
        for window, num_released in self._released.items():
            num_outside = (running.num_computed[rows] - (window - 1)) // self.block_size
            moved = np.flatnonzero(num_outside > num_released[rows])
            sliding, ends = rows[moved], num_outside[moved]
            firsts, num_released[sliding] = num_released[sliding].tolist(), ends
            groups = [
                tables for tables, width in zip(self.tables, self.windows, strict=True) if width == window
            ]
            released: Table = []
            for row, first, end in zip(sliding.tolist(), firsts, ends.tolist(), strict=True):
                for tables in groups:
                    table = tables[row]
                    for at in range(first, end):
                        released.append(table[at])
                        table[at] = None
            self.pool.release(_held(released)[::-1])  # the earliest blocks are reused first

    def growth(self, rows: RowIds, lengths: Ints) -> Growth:
        """Return the blocks needed for `rows[i]` to have `lengths[i]` tokens."""
        growing = np.flatnonzero(lengths > self.capacity[rows])
        rows = rows[growing]
        counts = -((self.capacity[rows] - lengths[growing]) // self.block_size)
        num_new = int(counts.sum()) * len(self.tables)
        if num_new > self.pool.num_free and self.tiers is not None:
            self.tiers.release_waiting()
        return Growth(lengths, rows, counts, max(num_new - self.pool.num_free, 0))

    def grow(self, growth: Growth) -> tuple[Ints, Ints]:
        """Allocate the blocks of `growth`. Return their rows [n] and their block ids [layer groups, n]."""
        rows, counts = growth.rows, growth.counts
        if not len(rows):
            return _NONE, _NONE.reshape(len(self.tables), 0)
        self.capacity[rows] += counts * self.block_size
        block_rows = np.repeat(rows.astype(np.int32), counts)
        owners, count = block_rows.tolist(), len(block_rows)
        taken = self.pool.take(count * len(self.tables))
        for group, tables in enumerate(self.tables):
            for row, block in zip(owners, taken[group * count : (group + 1) * count], strict=True):
                tables[row].append(block)
        return block_rows, np.array([block.id for block in taken], np.int32).reshape(-1, count)

    # ---- the prefix index

    def index(self, running: Running, rows: RowIds, lengths: Ints) -> None:
        """Index the blocks that the known tokens of each `rows[i]` fill, up to `lengths[i]` tokens. Blocks
        are indexed before they are written; steps that share them run later and read them after the write."""
        if not self.share_prefixes:
            return
        num_full = np.minimum(lengths, running.num_known[rows]) // self.block_size
        num_indexed = self.num_indexed[rows]
        filled = np.flatnonzero(num_full > num_indexed)
        if not len(filled):
            return
        rows, lengths = rows[filled], lengths[filled]
        num_indexed, num_full = num_indexed[filled], num_full[filled]
        remember, fresh = self.pool.remember, self._newly_indexed
        for row, first, end in zip(rows.tolist(), num_indexed.tolist(), num_full.tolist(), strict=True):
            request = running.request(row)
            keys = request.block_keys
            if len(keys) < end:
                self._hash(request, running.tokens[row], end)
            for tables, mark in self._groups:
                table = tables[row]
                for at in range(first, end):
                    block = table[at]
                    if block is not None:
                        remember(block, keys[at] + mark)
                        fresh.append(block)
            if self.events is not None:
                tables_of_row = [tables[row] for tables in self.tables]
                self.events.indexed(request, running.tokens[row], tables_of_row, range(first, end))
        self.num_indexed[rows] = num_full
        if self.states is not None:
            self.states.take(running, rows, lengths)

    def take_saves(self, running: Running) -> Ints:
        """Return [3, n]: rows, slots and token counts of the SSM state checkpoints that the planned step
        takes."""
        if self.states is None:
            return _NO_SAVES
        saves, slots = self.states.take_saves()
        self._newly_indexed += slots
        if self.events is not None:
            for row, _, num_tokens in saves.T.tolist():
                place = num_tokens // self.block_size - 1
                self.events.stored(running.request(row), running.tokens[row], len(self.windows), [place])
        return saves

    # ---- lower tiers

    @property
    def checks(self) -> tuple[AdmissionCheck, ...]:
        """Return the admission check of requests with blocks in lower tiers, if there are any tiers."""
        return () if self.tiers is None else (self.tiers,)

    @property
    def has_work(self) -> bool:
        """Whether there is work that does not depend on requests: copies to and from lower tiers."""
        return self.tiers is not None and self.tiers.has_work

    def take_stores(self, step: int) -> BlockStores | None:
        """Return the blocks that the planned step copies to lower tiers."""
        stores = None if self.tiers is None else self.tiers.plan(step, self._newly_indexed)
        self._publish()
        return stores

    def finish_step(self, step: int) -> None:
        """Record that a step is done, so that its blocks are written."""
        if self.tiers is not None:
            self.tiers.finish_step(step)
        self._publish()

    def flush_stores(self) -> None:
        """Copy the blocks that wait for the next step to lower tiers now, as no step is planned."""
        if self.tiers is not None:
            self.tiers.flush_stores()
        self._publish()

    def take_tier_stats(self) -> TierStats | None:
        """Return the statistics of the lower tiers since the last call; None without lower tiers."""
        return None if self.tiers is None else self.tiers.take_stats()

    def forget_steps(self) -> None:
        """Forget the steps in flight and the blocks that were indexed for the next one."""
        self.forget(self.take_indexed())
        if self.tiers is not None:
            self.tiers.forget_steps()
        self._publish()

    def _publish(self) -> None:
        """Publish the cache events since the last call."""
        if self.events is not None:
            self.events.flush()

    def close(self) -> None:
        """Stop publishing KV events, and end the exchange of prefixes with other engines."""
        if self.events is not None:
            self.events.close()
        if self.tiers is not None:
            self.tiers.close()

    # ---- blocks of steps

    def take_indexed(self) -> list[Block]:
        """Return the blocks added to the prefix index since the last call."""
        fresh, self._newly_indexed = self._newly_indexed, []
        return fresh

    def forget(self, blocks: list[Block]) -> None:
        """Remove blocks from the prefix index that were not written after all, as their steps failed."""
        if self.events is not None:
            self.events.forgotten(blocks)
        for block in blocks:
            self.pool.forget(block)

    def reset(self, external: bool = False) -> bool:
        """Forget every prefix on the device, and with `external` those in lower tiers. Return False and do
        nothing while blocks are in use."""
        if self.tiers is not None:
            self.tiers.drain()
        if not self.pool.reset() or (self.states is not None and not self.states.pool.reset()):
            return False
        if self.tiers is not None and external:
            self.tiers.clear()
        if self.events is not None:
            self.events.cleared()
        self._publish()
        self.reasons.forget()
        return True

    def _hash(self, request: Request, tokens: Ints, num_full: int) -> None:
        """Extend the request's keys to its first `num_full` blocks; each block is hashed once per request."""
        keys, size = request.block_keys, self.block_size
        parent = keys[-1][:DIGEST_BYTES] if keys else _root_key(request)
        embeds, media = request.embeds, request.media
        suffix = b"" if request.cache_salt is None else SALTED
        for start in range(len(keys) * size, num_full * size, size):
            content = tokens[start : start + size].tobytes()
            if embeds is not None:
                content += embeds.keys_of(start, start + size)
            if media is not None:
                content += media.keys_of(start, start + size)
            parent = block_hash(parent, content)
            keys.append(parent + suffix)
