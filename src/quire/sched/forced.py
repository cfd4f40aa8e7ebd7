"""ForcedDrafts: tokens that grammars force, as draft tokens that are always accepted."""

import numpy as np

from quire.data.step_plan import Ints
from quire.memory import MAX_MIXED_DRAFTS, MAX_MIXED_ROWS, MAX_TAPED
from quire.sched.grammar import Constraints
from quire.sched.running import Running
from quire.sched.spec import NO_DRAFTS, Drafts


class ForcedDrafts:
    """Chooses draft tokens for the rows whose grammar allows only one text next."""

    def __init__(self, constraints: Constraints, max_tokens: int) -> None:
        """Build it for at most `max_tokens` forced tokens of a step."""
        self._constraints = constraints
        self._max_tokens = max_tokens

    def draft(self, running: Running, chunks: Ints, budget: int) -> Drafts:
        """Return the forced tokens, at most `budget` in all, of those rows of `running.order` that decode.
        `chunks` is the number of tokens that each row computes without drafts.

        Their number is a power of two, so that few shapes of steps are recorded as tapes."""
        rows = running.order
        most = min(self._max_tokens, budget)
        if len(rows) <= MAX_TAPED:  # the step stays one that a tape replays
            most = min(most, MAX_MIXED_DRAFTS if len(rows) <= MAX_MIXED_ROWS else 0)
        decodes = (chunks == 1) & (running.num_tokens[rows] - running.num_computed[rows] == 1)
        places = np.flatnonzero(decodes & running.constrained[rows] & running.drafts[rows])
        if most < 1 or not len(places):
            return NO_DRAFTS
        runs = [self._run(running, row) for row in rows[places].tolist()]
        total = min(sum(map(len, runs)), most)
        if not total:
            return NO_DRAFTS
        left = 1 << total.bit_length() - 1
        counts, token_ids = np.zeros(len(rows), np.int32), list[int]()
        for place, run in zip(places.tolist(), runs, strict=True):
            token_ids += run[:left]
            counts[place] = min(len(run), left)
            left -= counts.item(place)
        running.has_forced[rows[counts > 0]] = True
        return Drafts(counts, np.array(token_ids, np.int32))

    def _run(self, running: Running, row: int) -> list[int]:
        """Return the forced tokens that a row may have as drafts. Sampled tokens without a known value are
        the first of the forced tokens, if there are any."""
        num_known = running.num_known.item(row)
        first = running.num_tokens.item(row) + running.num_drafts.item(row) - num_known
        end = running.limit.item(row) - num_known - 1
        return list(self._constraints.forced_tokens(running, row)[first : max(end, first)])
