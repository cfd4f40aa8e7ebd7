"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens.

Among several places the one with the longest matching context counts, up to CONTEXT tokens; among equals the
latest. Share of right drafts of 5 (10) tokens after matches of 5, with SmolLM2's tokenizer:

| | files of this project, edited | passages quoted between sentences |
|---|--:|--:|
| the earliest place | 86% (81%) | 79% (69%) |
| the latest place | 82% (77%) | 81% (71%) |
| the most frequent next token | 83% (78%) | 81% (72%) |
| the longest context | 95% (91%) | 89% (81%) |
"""

from array import array

import numpy as np

from quire.data.step_plan import Ints
from quire.sched.proposers.text import TokenText

CONTEXT = 32
"""Maximum number of tokens before an occurrence that are compared."""
MAX_PLACES = 16
"""Number of latest occurrences that are considered."""
SURE = 8
"""Number of matching tokens from which on a draft counts as sure. Such long matches hardly occur by chance:
in prose 39 % of first drafts were right, after such a match in quotes and edited code 99 %
(benchmarks/spec_workloads.py)."""
_NONE: Ints = np.empty(0, np.int32)


class NGram:
    """Proposes the tokens that followed an earlier occurrence of the last `min_n` to `max_n` tokens."""

    def __init__(self, min_n: int, max_n: int) -> None:
        assert 1 <= min_n <= max_n
        self._n = min_n
        longer = (max_n, 2 * max_n, 4 * max_n, CONTEXT)
        lengths = {*range(min_n, max_n + 1), *(length for length in longer if length <= CONTEXT)}
        self._lengths = sorted(lengths, reverse=True)
        self._texts: dict[int, TokenText] = {}
        self.is_sure = False

    def admit(self, row: int, tokens: Ints, salt: str | None = None) -> None:
        self._texts[row] = TokenText(tokens, self._n)

    def extend(self, row: int, tokens: Ints) -> None:
        self._texts[row].extend(tokens)

    def release(self, row: int, tokens: Ints) -> None:
        self._texts.pop(row, None)

    def propose(self, row: int, max_drafts: int) -> Ints:
        text = self._texts[row]
        tokens = text.tokens
        if len(tokens) <= self._n or max_drafts < 1:
            return _NONE
        place = self._longest(tokens, text.places(text.ending, MAX_PLACES))
        if place is None:
            return _NONE
        self.is_sure = place >= SURE and tokens[place - SURE : place] == tokens[-SURE:]
        draft = tokens[place : place + max_drafts]
        if len(draft) < max_drafts:
            draft = (draft * max_drafts)[:max_drafts]  # the text repeats itself
        return np.frombuffer(draft, np.int32)

    def _longest(self, tokens: "array[int]", places: list[int]) -> int | None:
        """Return the place (position after an earlier occurrence) before which most tokens match the end of
        `tokens`; among equals the first of `places`."""
        for length in self._lengths if len(places) > 1 else self._lengths[-1:]:
            end = tokens[-length:]
            for place in places:
                if place >= length and tokens[place - length : place] == end:
                    return place
        return None
