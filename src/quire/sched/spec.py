"""Drafts: tokens that rows compute before it is known that they will draw them."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.data.plan import Ints
from quire.data.stats import StepStats
from quire.sched.in_flight import StepInFlight
from quire.sched.proposers import SORTS, Proposer
from quire.sched.running import RowIds, Running
from quire.sched.step_tokens import StepTokens

_NONE: Ints = np.empty(0, np.int32)
_LATELY = 16
"""Plans."""
_NOW_AND_THEN = 64
"""Each so many plans."""


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


class Paces(Protocol):
    """Decides how many drafts rows are worth."""

    def admit(self, row: int) -> None:
        """A request takes a row, and nothing is known of it."""

    def lengths(self, rows: RowIds, available: Ints, budget: int) -> Ints:
        """For each of these rows, of so many that it could have, and in all."""

    def learn(self, rows: RowIds, num_drafts: Ints, num_accepted: Ints) -> None:
        """Of so many drafts of each row so many held."""

    def timed(self, num_tokens: int, num_rows: int, num_accepted: int, seconds: float) -> None:
        """How long a step without prompts took."""


class Drafting:
    """Which rows are given drafts, and what became of them."""

    def __init__(
        self,
        pace: Paces,
        proposer: Proposer | None,
        *,
        most: int,
        ahead: bool = False,
        max_draws: int | None = None,
        most_of: Callable[[int], int] | None = None,
        max_len: int | None = None,
        vocab: int | None = None,
    ) -> None:
        """Without a proposer the worker makes them, for each row that has drawn a token there. If it is
        `ahead` of the host, it has none for rows whose draws depend on what the tokens before are.
        `max_draws` in a step, where the rows are padded to a power of two. `most_of` says how many drafts
        each of so many rows may have. Sequences have drafts up to `max_len` tokens. A proposer's are cut
        where one is no token of the `vocab`."""
        self._most_of = most_of
        self._max_len = max_len
        self._vocab = vocab
        self._ahead = ahead
        self._max_draws = max_draws
        self._pace = pace
        self._proposer = proposer
        self._most = most
        self._known: dict[int, tuple[int, int]] = {}
        """By row: whose it is, and how many of its tokens the proposer was told."""
        self._num_plans = 0
        self._drafted_in: dict[int, int] = {}
        """By row: the last plan in which it had drafts."""
        self._sure: set[int] = set()
        """Rows of which the last drafts were."""

    def draft(self, running: Running, chunks: Ints, budget: int) -> Drafts:
        """For the rows of `running.order`, which compute `chunks`: up to `budget` tokens more."""
        self._num_plans += 1
        rows = running.order
        decodes = (chunks == 1) & (running.num_tokens[rows] - running.num_computed[rows] == 1)
        most = self._most_of_each(running, rows)
        places = np.flatnonzero(decodes & self._may_have(running, rows) & (most > 0))
        for row in rows[places].tolist():
            self._meet(running, row)
        found: list[Ints] = []
        if self._proposer is None:
            places = places[running.num_tokens[rows[places]] > running.first_len[rows[places]]]
            available = most[places]
        else:
            self._wait(running, rows, rows[places])
            places = places[running.num_tokens[rows[places]] == running.num_known[rows[places]]]
            each = zip(rows[places].tolist(), most[places].tolist(), strict=True)
            found = [self._propose(running, row, count) for row, count in each]
            available = np.array([len(new) for new in found], np.int32)
        if not available.any() or budget < 1:
            return NO_DRAFTS
        could, counts = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
        could[places] = available
        counts[decodes] = self._pace.lengths(self._sorted(rows[decodes]), could[decodes], budget)
        if not counts.any():
            return NO_DRAFTS
        self._drafted_in |= dict.fromkeys(rows[counts > 0].tolist(), self._num_plans)
        if self._proposer is None:
            return Drafts(counts, _NONE)
        cut = [new[:count] for new, count in zip(found, counts[places].tolist(), strict=True)]
        return Drafts(counts, np.concatenate(cut).astype(np.int32))

    def _most_of_each(self, running: Running, rows: RowIds) -> Ints:
        """How many drafts a row may have, whether it has any or not."""
        limit = running.limit[rows]
        if self._max_len is not None:
            limit = np.minimum(limit, self._max_len)
        most = self._most if self._most_of is None else self._most_of(len(rows))
        found: Ints = np.minimum(limit - running.num_tokens[rows] - running.num_drafts[rows] - 1, most)
        if self._ahead:
            found = np.minimum(found, self._before_free(running, rows))
        if self._max_draws is not None:
            found = np.minimum(found, self._max_draws // (1 << max(len(rows) - 1, 0).bit_length()) - 1)
        return found

    def _may_have(self, running: Running, rows: RowIds) -> NDArray[np.bool_]:
        """Whether a row may have drafts of whoever makes them."""
        may: NDArray[np.bool_] = running.drafts[rows]
        if self._proposer is None:
            may &= ~running.constrained[rows]  # nobody here knows which masks their drafts would need
            if self._ahead:
                may &= ~running.needs_value[rows]
        return may

    def _sorted(self, rows: RowIds) -> RowIds:
        """As the pace knows them: drafts of a row that are sure are learned of apart from others."""
        if self._proposer is None:
            return rows
        return rows * SORTS + np.array([row in self._sure for row in rows.tolist()], np.intp)

    def _before_free(self, running: Running, rows: RowIds) -> Ints:
        """How many drafts leave no doubt, whatever becomes of them, whether `min_tokens` still holds: the
        worker hears of lengths too late."""
        num_tokens, min_len = running.num_tokens[rows], running.min_len[rows]
        is_free = num_tokens >= min_len
        left: Ints = np.where(is_free, self._most, min_len - num_tokens - running.num_drafts[rows] - 1)
        return left

    def _meet(self, running: Running, row: int) -> None:
        """Forget whoever had the row before."""
        admission = int(running.admission[row])
        if self._known.get(row, (0, 0))[0] != admission:
            self._known[row] = admission, 0
            self._pace.admit(row)

    def _wait(self, running: Running, all_rows: RowIds, rows: RowIds) -> None:
        """Drafts are made of known tokens. Of the rows that may have some, one for which none seemed to pay
        lately goes on without, and is looked at now and then."""
        running.waits[all_rows] = False
        if self._num_plans % _NOW_AND_THEN == 0:
            running.waits[rows] = True
        else:
            since = (self._num_plans - self._drafted_in.get(row, -_LATELY) for row in rows.tolist())
            running.waits[rows] = [plans < _LATELY for plans in since]

    def _propose(self, running: Running, row: int, most: int) -> Ints:
        assert self._proposer is not None
        length, (admission, told) = int(running.num_known[row]), self._known[row]
        if not told:
            self._proposer.admit(row, running.tokens[row, :length], running.request(row).cache_salt)
        elif told < length:
            self._proposer.extend(row, running.tokens[row, told:length])
        self._known[row] = admission, length
        found = self._proposer.propose(row, most)
        (self._sure.add if self._proposer.is_sure else self._sure.discard)(row)
        if not len(found):
            return found
        if self._vocab is not None and len(wrong := np.flatnonzero((found < 0) | (found >= self._vocab))):
            return found[: wrong[0]]
        return found

    def release(self, running: Running, row: int) -> None:
        """The row's request leaves it."""
        self._drafted_in.pop(row, None)
        if self._known.pop(row, (0, 0))[1] and self._proposer is not None:
            self._proposer.release(row, running.tokens[row, : running.num_known[row]])

    def learn(self, landed: StepTokens, stats: StepStats) -> dict[str, int]:
        """A step is over. By request that had drafts: how many."""
        if not len(landed.num_drafts) or not len(planned := np.flatnonzero(landed.num_drafts)):
            return {}
        rows, num_drafts = landed.sampled[planned], landed.num_drafts[planned]
        num_held = landed.result.counts[planned] - 1
        sorted_ = self._sorted(rows)
        self._pace.learn(sorted_, num_drafts, num_held)  # one that was not found is as good as a wrong one
        if len(landed.result.drafted):
            num_drafts = landed.result.drafted[planned]
            found = num_drafts > 0
            rows, num_held, num_drafts = rows[found], num_held[found], num_drafts[found]
        if not len(rows):
            return {}
        stats.num_drafts, stats.num_draft_tokens = len(rows), int(num_drafts.sum())
        stats.held_by_place = (num_held[:, None] > np.arange(num_drafts.max())).sum(axis=0).tolist()
        return dict(zip(landed.running.ids[rows].tolist(), num_drafts.tolist(), strict=True))

    def timed(self, flight: StepInFlight) -> None:
        """How long a step took, if it says something about decodes."""
        plan = flight.plan
        if len(plan.logit_rows) == plan.total_tokens and not plan.admitted:
            num_held = sum(flight.notes.stats.held_by_place)
            self._pace.timed(plan.total_tokens, len(plan.rows), num_held, flight.seconds)
