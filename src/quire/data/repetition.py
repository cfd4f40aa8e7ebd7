"""Repetition detection: whether the output of a sequence ends in copies of one pattern of tokens."""

import numpy as np
from numpy.typing import NDArray

from quire.data.params import RepetitionDetectionParams

_MAX_COPIES = 1 << 40
"""Number of copies that no output has, which keeps `size * copies` within 64 bits."""


class RepetitionCounts:
    """Repetition detection for one growing output, in time proportional to the number of pattern sizes.

    Each pattern size has a run: the number of last tokens that equal the token `size` places before them. The
    output ends in `count` copies of a pattern of that size if the run is at least `size * (count - 1)`.
    """

    __slots__ = ("_min_size", "_max_size", "_needed", "_runs", "_num_seen", "_last")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._min_size, self._max_size = max(params.min_pattern_size, 1), params.max_pattern_size
        sizes = np.arange(self._min_size, self._max_size + 1, dtype=np.int64)
        self._needed = sizes * min(params.min_count - 1, _MAX_COPIES)
        self._runs = np.zeros(len(sizes), np.int64)
        self._num_seen, self._last = 0, -1
        """Number of tokens that the runs include, and the last of these tokens; -1 without one."""

    def is_repetition(self, output: NDArray[np.integer]) -> bool:
        """Return whether the output ends in a repetition. If it has one more token than at the last call,
        only this token is counted; otherwise all tokens are counted again, as after `min_tokens`."""
        num_seen = self._num_seen
        if len(output) == num_seen + 1 and (not num_seen or output[-2] == self._last):
            self._add_last(output)
        else:
            self._start_over(output)
        self._num_seen = len(output)
        self._last = int(output[-1]) if len(output) else -1
        return bool((self._runs >= self._needed).any())

    def _add_last(self, output: NDArray[np.integer]) -> None:
        """Extend or reset each run by the last token."""
        last = len(output) - 1
        before = output[max(last - self._max_size, 0) : max(last - self._min_size + 1, 0)][::-1]
        runs = self._runs[: len(before)]  # runs of the sizes that are less than the length of the output
        runs += 1
        runs *= before == output[last]

    def _start_over(self, output: NDArray[np.integer]) -> None:
        backward = output[::-1]
        self._runs[:] = 0
        for place in range(min(len(self._runs), len(output) - self._min_size)):
            size = self._min_size + place
            differs = backward[:-size] != backward[size:]
            first = int(differs.argmax())
            self._runs[place] = first if differs[first] else len(differs)
