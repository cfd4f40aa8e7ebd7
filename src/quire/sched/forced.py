"""ForcedDrafts: tokens that grammars force, as draft tokens that are always accepted."""

import numpy as np

from quire.data.step_plan import Ints
from quire.sched.grammar import Constraints
from quire.sched.running import Running
from quire.sched.spec import NO_DRAFTS, Drafts


class ForcedDrafts:
    """Chooses draft tokens for the rows whose grammar allows only one text next."""

    def __init__(self, constraints: Constraints, max_tokens: int) -> None:
        """Build it for at most `max_tokens` forced tokens of a step; 0: none."""
        self._constraints = constraints
        self._max_tokens = max_tokens

    def draft(self, running: Running, chunks: Ints, budget: int) -> Drafts:
        """Return the forced tokens, at most `budget` in all, of those rows of `running.order` that decode.
        `chunks` is the number of tokens that each row computes without drafts.

        A sampled token without a known value is the next of the forced tokens, if there are any."""
        rows, left = running.order, min(self._max_tokens, budget)
        if left < 1 or not running.constrained[rows].any():
            return NO_DRAFTS
        unknown = running.num_tokens[rows] + running.num_drafts[rows] - running.num_known[rows]
        decodes = (chunks == 1) & (running.num_tokens[rows] - running.num_computed[rows] == 1)
        places = np.flatnonzero(decodes & running.constrained[rows] & running.drafts[rows])
        counts, token_ids = np.zeros(len(rows), np.int32), list[int]()
        for place in places.tolist():
            row, first = int(rows[place]), int(unknown[place])
            room = int(running.limit[row] - running.num_known[row]) - 1 - first
            forced = self._constraints.forced_tokens(running, row)[first : first + max(min(room, left), 0)]
            counts[place] = len(forced)
            token_ids += forced
            left -= len(forced)
        if not token_ids:
            return NO_DRAFTS
        running.has_forced[rows[counts > 0]] = True
        return Drafts(counts, np.array(token_ids, np.int32))
