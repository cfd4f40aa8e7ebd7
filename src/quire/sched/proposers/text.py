"""Tokens that grow at the end, and can be searched for what they end with."""

from array import array
from bisect import bisect_right

import numpy as np

from quire.data.plan import Ints

MIN_RECENT = 4096
"""Tokens that a text grows by, at least, until it is sorted again."""
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_PLACES = (1 << 24) - 1
"""The bits of a sorted entry that are a place; those above are of a hash."""


class TokenText:
    """The tokens of a request, and where each run of n of them ended: sorted once, the recent ones in a
    dict."""

    __slots__ = ("_hash", "_leaving", "_n", "_older", "_recent", "_sorted", "_sorted_len", "tokens")

    def __init__(self, tokens: Ints, n: int) -> None:
        self.tokens = array("i", np.ascontiguousarray(tokens, np.int32).tobytes())
        self._n, self._leaving = n, pow(_FACTOR, n + 1, 1 << 64)
        self._hash = 0
        """Of the last n tokens."""
        self._sorted: array[int] | None = None
        """Made when it is first asked for: who never is costs nothing."""
        self._sorted_len = 0
        self._recent: dict[int, int] = {}
        """Hash -> the latest place since."""
        self._older: list[int] = []
        """The place before each of those, by how far it is behind what was sorted."""

    def extend(self, tokens: Ints) -> None:
        if self._sorted is None:
            self.tokens.frombytes(np.ascontiguousarray(tokens, np.int32).tobytes())
            return
        own, recent, key = self.tokens, self._recent, self._hash
        for token in tokens.tolist():
            place = len(own)
            self._older.append(recent.get(key, -1))
            recent[key] = place
            key = ((key + token) * _FACTOR - own[place - self._n] * self._leaving) & _MASK
            own.append(token)
        self._hash = key
        if len(self._older) > max(MIN_RECENT, self._sorted_len // 4):
            self._sort()

    @property
    def ending(self) -> int:
        """What the last n tokens, of so many at least, are looked up by."""
        if self._sorted is None:
            self._sort()
        return self._hash

    def places(self, ending: int, most: int) -> list[int]:
        """Where n tokens may have stood: what followed them, latest first, so many at most."""
        if self._sorted is None:
            self._sort()
        assert self._sorted is not None
        found: list[int] = []
        place = self._recent.get(ending, -1)
        while place >= 0 and len(found) < most:
            found.append(place)
            place = self._older[place - self._sorted_len]
        entries, least = self._sorted, ending & ~_PLACES
        at = bisect_right(entries, least | _PLACES) - 1
        while at >= 0 and len(found) < most and (entry := entries[at]) >= least:
            found.append(entry & _PLACES)
            at -= 1
        return found

    def _sort(self) -> None:
        tokens, n = np.array(self.tokens, np.int32).astype(np.uint64), self._n
        hashes = np.zeros(len(tokens) - n + 1, np.uint64)
        for start in range(n):
            hashes += tokens[start : start + len(hashes)]
            hashes *= np.uint64(_FACTOR)
        self._hash = int(hashes[-1])  # how the text ends, which nothing follows yet
        entries = hashes[:-1] & np.uint64(_MASK ^ _PLACES) | np.arange(n, len(tokens), dtype=np.uint64)
        entries.sort()
        self._sorted, self._sorted_len = array("Q", entries.tobytes()), len(tokens)
        self._recent, self._older = {}, []
