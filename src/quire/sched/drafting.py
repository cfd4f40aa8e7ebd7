"""Drafts: tokens that rows compute before it is known that they will draw them."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.data.plan import Ints
from quire.data.stats import StepStats
from quire.sched.drafts import Proposer
from quire.sched.in_flight import Flight
from quire.sched.landed import Landed
from quire.sched.running import RowIds, Running

_NONE: Ints = np.empty(0, np.int32)


class Drafts(NamedTuple):
    """Those of some rows."""

    counts: Ints
    """How many of each; empty: none has any."""
    token_ids: Ints
    """All of them, one row after the other; empty: the worker has made them itself."""

    def behind(self, count: int) -> "Drafts":
        """The same, with so many rows more that have none."""
        if not len(self.counts):
            return self
        return self._replace(counts=np.append(self.counts, np.zeros(count, np.int32)))

    def of(self, rows: NDArray[np.bool_]) -> "Drafts":
        """The same, without rows that have none."""
        return self._replace(counts=self.counts[rows]) if len(self.counts) else self


NO_DRAFTS = Drafts(_NONE, _NONE)


class Lengths(Protocol):
    """Decides how many drafts a row is worth."""

    def lengths(self, rows: RowIds) -> Ints: ...

    def learn(self, rows: RowIds, num_drafts: Ints, num_held: Ints) -> None:
        """Of so many drafts of each row so many held."""

    def timed(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """How long a step without prompts took."""


class Drafting:
    """Which rows are given drafts, and what became of them."""

    def __init__(self, pace: Lengths, proposer: Proposer | None) -> None:
        """Without a proposer the worker makes them, for each row that has drawn a token there."""
        self.pace = pace
        self._proposer = proposer
        self._known: dict[int, tuple[int, int]] = {}
        """By row that the proposer knows: whose it is, and how many of its tokens it was told."""

    def draft(self, running: Running, chunks: Ints, budget: int) -> Drafts:
        """For the rows of `running.order`, which compute `chunks`: up to `budget` tokens more."""
        rows = running.order
        num_tokens, num_known = running.num_tokens[rows], running.num_known[rows]
        most = np.minimum(
            self.pace.lengths(rows), running.limit[rows] - num_tokens - running.num_drafts[rows] - 1
        )
        most[(chunks != 1) | (num_tokens - running.num_computed[rows] != 1)] = 0
        if self._proposer is None:
            most[num_tokens == running.first_len[rows]] = 0
            counts = np.diff(np.minimum(np.cumsum(most.clip(0)), max(budget, 0)), prepend=0).astype(np.int32)
            return Drafts(counts, _NONE) if counts.any() else NO_DRAFTS
        running.waits[rows] = most > 0
        most[num_tokens != num_known] = 0
        counts, found = np.zeros(len(rows), np.int32), []
        for place in np.flatnonzero(most > 0).tolist():
            new = self._propose(running, int(rows[place]), min(int(most[place]), budget))
            counts[place], budget = len(new), budget - len(new)
            found.append(new)
        return Drafts(counts, np.concatenate(found).astype(np.int32)) if counts.any() else NO_DRAFTS

    def _propose(self, running: Running, row: int, most: int) -> Ints:
        assert self._proposer is not None
        if most < 1:
            return _NONE
        admission, length = int(running.admission[row]), int(running.num_known[row])
        owner, told = self._known.get(row, (0, 0))
        if owner != admission:
            self._proposer.admit(row, running.tokens[row, :length])
        elif told < length:
            self._proposer.extend(row, running.tokens[row, told:length])
        self._known[row] = admission, length
        return self._proposer.propose(row, most)

    def release(self, running: Running, row: int) -> None:
        """The row's request leaves it."""
        if self._known.pop(row, None) is not None and self._proposer is not None:
            self._proposer.release(row, running.tokens[row, : running.num_known[row]])

    def learn(self, landed: Landed, stats: StepStats) -> dict[str, int]:
        """A step is over. By request that had drafts: how many."""
        num_drafts = landed.num_drafts
        drafted = np.flatnonzero(num_drafts)
        if not len(drafted):
            return {}
        rows, num_drafts = landed.sampled[drafted], num_drafts[drafted]
        num_held = landed.result.counts[drafted] - 1
        self.pace.learn(rows, num_drafts, num_held)
        stats.num_drafts, stats.num_draft_tokens = len(rows), int(num_drafts.sum())
        stats.held_by_place = (num_held[:, None] > np.arange(num_drafts.max())).sum(axis=0).tolist()
        return dict(zip(landed.running.ids[rows].tolist(), num_drafts.tolist(), strict=True))

    def timed(self, flight: Flight) -> None:
        """How long a step took, if it says something about decodes."""
        plan = flight.plan
        if len(plan.logit_rows) == plan.total_tokens and not plan.admitted:
            self.pace.timed(len(plan.rows), plan.total_tokens, flight.seconds)
