"""TokenText: a growing sequence of tokens with an index of its n-grams."""

from array import array
from bisect import bisect_right

import numpy as np

from quire.data.step_plan import Ints

MIN_RECENT = 4096
"""Minimum number of tokens that are added before the index of n-grams is sorted again."""
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_PLACES = (1 << 24) - 1
"""Number of low bits of an index entry that contain a place; the bits above contain a hash."""


class TokenText:
    """The tokens of a request, with an index of its n-grams. The index has the place (position after the end)
    of each n-gram: in a sorted array, and in a dict for recent n-grams."""

    __slots__ = ("_hash", "_leaving", "_n", "_older", "_recent", "_sorted", "_sorted_len", "tokens")

    def __init__(self, tokens: Ints, n: int) -> None:
        self.tokens = array("i", np.ascontiguousarray(tokens, np.int32).tobytes())
        self._n, self._leaving = n, pow(_FACTOR, n + 1, 1 << 64)
        self._hash = 0
        """Hash of the last n tokens."""
        self._sorted: array[int] | None = None
        """Sorted hashes with places, built on first use, so that texts never searched cost nothing."""
        self._sorted_len = 0
        self._recent: dict[int, int] = {}
        """Hash -> the latest place since the last sort."""
        self._older: list[int] = []
        """By place since the last sort: the latest earlier place with the same hash; -1: none since then."""

    def extend(self, tokens: Ints) -> None:
        if self._sorted is None:
            self.tokens.frombytes(np.ascontiguousarray(tokens, np.int32).tobytes())
            return
        text, recent, key = self.tokens, self._recent, self._hash
        for token in tokens.tolist():
            place = len(text)
            self._older.append(recent.get(key, -1))
            recent[key] = place
            key = ((key + token) * _FACTOR - text[place - self._n] * self._leaving) & _MASK
            text.append(token)
        self._hash = key
        if len(self._older) > max(MIN_RECENT, self._sorted_len // 4):
            self._sort()

    @property
    def ending(self) -> int:
        """Return the hash of the last n tokens, by which `places` finds them; there must be n tokens."""
        if self._sorted is None:
            self._sort()
        return self._hash

    def places(self, ending: int, max_places: int) -> list[int]:
        """Return the places behind earlier occurrences of the n tokens with hash `ending`, latest first."""
        if self._sorted is None:
            self._sort()
        assert self._sorted is not None
        places: list[int] = []
        place = self._recent.get(ending, -1)
        while place >= 0 and len(places) < max_places:
            places.append(place)
            place = self._older[place - self._sorted_len]
        entries, least = self._sorted, ending & ~_PLACES
        at = bisect_right(entries, least | _PLACES) - 1
        while at >= 0 and len(places) < max_places and (entry := entries[at]) >= least:
            places.append(entry & _PLACES)
            at -= 1
        return places

    def _sort(self) -> None:
        tokens, n = np.array(self.tokens, np.int32).astype(np.uint64), self._n
        hashes = np.zeros(len(tokens) - n + 1, np.uint64)
        for start in range(n):
            hashes += tokens[start : start + len(hashes)]
            hashes *= np.uint64(_FACTOR)
        self._hash = int(hashes[-1])  # the final n-gram, which nothing follows yet
        entries = hashes[:-1] & np.uint64(_MASK ^ _PLACES) | np.arange(n, len(tokens), dtype=np.uint64)
        entries.sort()
        self._sorted, self._sorted_len = array("Q", entries.tobytes()), len(tokens)
        self._recent, self._older = {}, []
