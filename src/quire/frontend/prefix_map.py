"""Map from prefixes of prompts to the engine cores that they were sent to."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_BUCKETS, WAYS = 1 << 15, 4
"""Number of buckets of the hash table, and entries per bucket: prefixes of thousands of long prompts in 1
MiB."""
_EVEN = 32
"""Maximum number of blocks up to which prefixes of every length are stored. The stored lengths of longer
prefixes are a 16th to a 32nd of the length apart."""
_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_CORE_BITS, _HOME = np.uint64(16), 1 << 15
_CORE, _MARK = np.uint64(_HOME - 1), np.uint64(2 * _HOME - 1)
"""Low bits of a table entry: the core, and whether this core is the home (first core) of the prefix. The
other bits are those of the key."""

Keys = NDArray[np.uint64]


def key_of_session(session: str) -> Keys:
    """Return the key of a session as an array of one number, which is stored like the keys of prefixes."""
    digest = hashlib.blake2b(session.encode(), digest_size=8, person=b"session").digest()
    return np.array([int.from_bytes(digest)], np.uint64)


class PrefixKeys:
    """Hash keys of prefixes. Equal prefixes have equal keys in every process."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._depths: NDArray[np.int64] = np.empty(0, np.int64)
        self._powers: Keys = np.empty(0, np.uint64)

    def of(self, token_ids: Sequence[int], extra: str | None) -> tuple[list[int], Keys]:
        """Return the lengths in tokens of the stored prefixes of a prompt, ascending, and their keys. They
        never include the last token, which is not cached."""
        num_blocks = (len(token_ids) - 1) // self.block_size
        if num_blocks < 1:
            return [], np.empty(0, np.uint64)
        self._grow(num_blocks)
        depths = self._depths[: int(np.searchsorted(self._depths, num_blocks, "right"))] * self.block_size
        keys = self._sums(token_ids[: int(depths[-1])], 0)[depths - 1]
        return depths.tolist(), _finished(keys, extra)

    def totals(self, token_ids: Sequence[int], num_before: int, total: int) -> list[int]:
        """Return the hash state after each block of tokens that follow `num_before` blocks with the state
        `total`, for `key`."""
        num_blocks = len(token_ids) // self.block_size
        self._grow(num_before + num_blocks)
        sums = self._sums(token_ids, num_before * self.block_size) + np.uint64(total)
        totals: list[int] = sums[self.block_size - 1 :: self.block_size].tolist()
        return totals

    def key(self, total: int, extra: str | None) -> int:
        """Return the key of the prefix with this hash state, which is that of `of`."""
        return int(_finished(np.array([total], np.uint64), extra)[0])

    def is_looked_up(self, num_blocks: int) -> bool:
        """Whether `of` has keys of prefixes of this many blocks."""
        self._grow(num_blocks)
        place = int(np.searchsorted(self._depths, num_blocks))
        return bool(self._depths[place] == num_blocks)

    def _sums(self, token_ids: Sequence[int], first: int) -> Keys:
        """Return the running sums of the hashes of tokens; the first token is at position `first` of the
        prompt."""
        ids = np.array(token_ids, np.uint64)
        mixed = (ids + np.uint64(1)) * _MIX
        return np.cumsum((mixed ^ (mixed >> np.uint64(29))) * self._powers[first : first + len(ids)])

    def _grow(self, num_blocks: int) -> None:
        if len(self._powers) >= num_blocks * self.block_size:
            return
        num_blocks = 1 << num_blocks.bit_length()
        depths = np.arange(1, num_blocks + 1)
        spacing = 1 << np.maximum(np.floor(np.log2(depths)).astype(np.int64) - _EVEN.bit_length() + 2, 0)
        self._depths = depths[depths % spacing == 0]
        self._powers = np.cumprod(np.full(num_blocks * self.block_size, _FACTOR), dtype=np.uint64)


def _finished(sums: Keys, extra: str | None) -> Keys:
    if extra is not None:
        sums = sums ^ np.uint64(int.from_bytes(hashlib.blake2b(extra.encode(), digest_size=8).digest()))
    return sums * _MIX


class PrefixMap:
    """The cores that prefixes were sent to, by key: the first core (home) of each prefix, and other cores.

    A hash table with few entries per bucket, of which the oldest is replaced. Without a file the table is
    private to this process. Processes that share the table write without locks: a race loses an entry, but no
    request."""

    def __init__(self, file: Path | None = None, *, num_buckets: int = NUM_BUCKETS) -> None:
        if file is None:
            self._table: Keys = np.zeros((num_buckets, WAYS), np.uint64)
        else:
            self._table = np.memmap(file, np.uint64, "r+").view(np.ndarray).reshape(-1, WAYS)

    @staticmethod
    def create(file: Path) -> None:
        np.zeros((NUM_BUCKETS, WAYS), np.uint64).tofile(file)

    def _rows(self, keys: Keys) -> tuple[NDArray[np.int64], Keys, NDArray[np.bool_]]:
        """Return the bucket index of each key, the entries of its bucket [keys, WAYS], and which of these
        entries are for the key."""
        buckets = (keys >> np.uint64(24)).astype(np.int64) % len(self._table)
        rows = self._table[buckets]
        return buckets, rows, (rows ^ keys[:, None]) >> _CORE_BITS == 0

    def find(self, keys: Keys) -> Iterator[tuple[int, list[int]]]:
        """Yield the indices of known keys, the deepest first, and the cores of each, its home first."""
        _, rows, same = self._rows(keys)
        for place in np.flatnonzero(same.any(axis=1))[::-1].tolist():
            marks = (rows[place][same[place]] & _MARK).tolist()
            yield place, [mark % _HOME - 1 for mark in sorted(marks, reverse=True)]

    def note(self, keys: Keys, core: int) -> None:
        """Record that a prompt with prefixes of these keys was sent to a core; the first core of a prefix is
        its home."""
        buckets, rows, same = self._rows(keys)
        new = ~(same & (rows & _CORE == core + 1)).any(axis=1)
        if new.any():
            is_home = ~same[new].any(axis=1)
            rows = rows[new]
            rows[:, :-1] = rows[:, 1:]
            rows[:, -1] = (keys[new] & ~_MARK) | np.uint64(core + 1) | (is_home * np.uint64(_HOME))
            self._table[buckets[new]] = rows

    def forget(self, keys: Keys, core: int) -> None:
        """Remove the entries of these keys for a core that has them no longer cached."""
        buckets, rows, same = self._rows(keys)
        places, ways = np.nonzero(same & (rows & _CORE == core + 1))
        self._table[buckets[places], ways] = 0

    def drop(self, core: int) -> None:
        """Remove the entries of a core that lost its KV cache."""
        self._table[self._table & _CORE == core + 1] = 0

    def clear(self) -> None:
        self._table[:] = 0
