"""StateCache: the part of the prefix cache that holds SSM states."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quire.data.cache_hints import CacheHints
from quire.data.kv_tiers import STATE_MARK
from quire.data.step_plan import Ints
from quire.sched.blocks import Block
from quire.sched.retention import RetainingPool
from quire.sched.running import RowIds, Running

_NEVER = 1 << 30
"""Position in `StateCache.next` of a row that takes no more checkpoints."""
_LEAST_HALF = 1024
"""Smallest position of a checkpoint, in tokens, that results from halving a prompt repeatedly."""


class _Save(NamedTuple):
    """A checkpoint that is taken in the step being planned."""

    row: int
    slot: Block
    num_tokens: int
    hints: CacheHints | None


class StateCache:
    """Checkpoints: SSM states of all layers after a prefix, each in a slot on the device.

    A request can use any number of leading KV blocks that it shares with another, but a state only if it
    shares all tokens before it. So states are copied to slots at chosen boundaries of a prompt, and steps end
    there. The key of a checkpoint is the key of the last KV block of its prefix and `STATE_MARK`.

    A step reads checkpoints before it computes and writes them afterwards, and steps run in order. So a slot
    may be written by the step that reads it, and a checkpoint is found from the next step on."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_rows: int,
        block_size: int,
        unit: int,
        interval: int | None = None,
        least_gap: int = 0,
        whole_items: bool = False,
    ) -> None:
        """Build the cache. Checkpoints are taken at boundaries: multiples of `unit` tokens, which is a
        multiple of the block size. A prompt has a boundary every `interval` tokens; 0: none of these, None:
        at half, a quarter, ... of the prompt. A prompt that continues a checkpoint has no boundary in the
        `least_gap` tokens after it; the boundary where it departs from known prompts needs a quarter of this
        gap. With `whole_items`, no step ends inside of a media item."""
        self.pool = RetainingPool(num_slots + 1)
        self.block_size, self.unit, self.interval = block_size, unit, interval
        self.least_gap = least_gap
        self.whole_items = whole_items
        self.next: Ints = np.full(max_rows, _NEVER, np.int32)
        """By row: the position in tokens at which its next step must end, so that a checkpoint can be
        taken."""
        self._boundaries_left: dict[int, list[int]] = {}
        """By row: positions at which checkpoints are still to be taken, the next one last."""
        self._saves: dict[bytes, _Save] = {}
        """Checkpoints of the step being planned, by key."""

    def longest(
        self, keys: Sequence[bytes], num_blocks: int, find: Callable[[bytes], Block | None] | None = None
    ) -> int:
        """Return the number of blocks of the longest prefix, at most `num_blocks`, that has a checkpoint.
        `find` returns the checkpoint with a key; by default those on the device are found."""
        step, find = self.unit // self.block_size, find or self.pool.find
        for count in range(num_blocks // step * step, 0, -step):
            if find(keys[count - 1] + STATE_MARK) is not None:
                return count
        return 0

    def use(self, key: bytes, hints: CacheHints | None = None) -> int:
        """Return the slot of the state checkpoint after the block with this key, which must exist. It is now
        the last to be evicted; `hints` retain it longer, as they retain blocks."""
        slot = self.pool.find(key + STATE_MARK)
        assert slot is not None, "lookup() found no checkpoint"
        self.pool.share([slot])
        self.pool.release([slot], hints)
        return slot.id

    # ---- boundaries

    def boundaries(self, num_tokens: int, num_cached: int, num_seen: int) -> list[int]:
        """Return where a prompt of `num_tokens` gets checkpoints, in descending order, if it starts after
        `num_cached` tokens: at its end, where it departs from known prompts after `num_seen` tokens, and in
        between."""
        unit, last = self.unit, (num_tokens - 1) // self.unit * self.unit
        least_gap = self.least_gap if num_cached else 0
        ends, departs_at = {last}, min(num_seen, last) // unit * unit
        if self.interval:
            ends.update(range(self.interval, last, self.interval))
        elif self.interval is None:
            half = last // 2
            while half >= _LEAST_HALF:
                ends.add(half // unit * unit)
                half //= 2
        ends = {end for end in ends if end >= num_cached + least_gap}
        if departs_at >= num_cached + least_gap // 4:
            ends.add(departs_at)
        return sorted((end for end in ends if end > num_cached), reverse=True)

    def admit(self, row: int, boundaries: list[int]) -> None:
        if boundaries:
            self._boundaries_left[row] = boundaries
            self.next[row] = boundaries[-1]

    def free(self, row: int) -> None:
        if self._boundaries_left.pop(row, None) is not None:
            self.next[row] = _NEVER

    def limit(self, running: Running, pending: Ints) -> Ints:
        """Limit the pending tokens of each row of `running.order`, so that a step ends at the position of the
        row's next checkpoint."""
        if not self._boundaries_left:
            return pending
        rows = running.order
        limited: Ints = np.minimum(pending, self.next[rows] - running.num_computed[rows])
        return limited

    # ---- checkpoints

    def take(self, running: Running, rows: RowIds, lengths: Ints) -> None:
        """Take checkpoints of those of `rows` that compute up to a boundary, `lengths[i]`, in the step being
        planned. No checkpoint is taken if it is cached or planned already, or if no slot is free.

        A checkpoint never contains drafts: boundaries lie before the last token of the tokens that a row was
        admitted with, and a row has no drafts before its last token is the only one to compute."""
        if not self._boundaries_left:
            return
        at = np.flatnonzero(self.next[rows] <= lengths)
        for row, num_tokens in zip(rows[at].tolist(), lengths[at].tolist(), strict=True):
            left = self._boundaries_left[row]
            while left and left[-1] < num_tokens:
                left.pop()
            if left and left[-1] == num_tokens:
                left.pop()
                request = running.request(row)
                key = request.block_keys[num_tokens // self.block_size - 1] + STATE_MARK
                if self.pool.find(key) is None and key not in self._saves and self.pool.num_free:
                    self._saves[key] = _Save(row, self.pool.take(1)[0], num_tokens, request.hints)
            if left:
                self.next[row] = left[-1]
            else:
                self.free(row)

    def is_checkpoint_planned(self, keys: Sequence[bytes], num_cached: int, max_tokens: int) -> bool:
        """Whether the step being planned takes a checkpoint of a prefix with these keys that has more than
        `num_cached` tokens, and at most `max_tokens`."""
        return any(
            num_cached < save.num_tokens <= max_tokens
            and keys[save.num_tokens // self.block_size - 1] + STATE_MARK == key
            for key, save in self._saves.items()
        )

    def take_saves(self) -> tuple[Ints, list[Block]]:
        """Index the checkpoints of the step that was planned. Return [3, n], their rows, slots and numbers of
        tokens, and their entries."""
        saves, self._saves = self._saves, {}
        slots = [save.slot for save in saves.values()]
        for key, save in saves.items():
            self.pool.remember(save.slot, key)
            self.pool.release([save.slot], save.hints)
        columns = [(save.row, save.slot.id, save.num_tokens) for save in saves.values()]
        return np.array(columns, np.int32).reshape(-1, 3).T, slots
