"""Drafts: speculative tokens that rows compute before they are sampled, to be verified in the same step."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.data.stats import StepStats
from quire.data.step_plan import Ints
from quire.sched.in_flight import StepInFlight
from quire.sched.proposers import NUM_DRAFT_KINDS, Proposer
from quire.sched.proposers.adaptive_length import AdaptiveDraftLength
from quire.sched.running import RowIds, Running
from quire.sched.step_tokens import StepTokens

_NONE: Ints = np.empty(0, np.int32)
_RECENT_PLANS = 16
"""Number of plans after drafts of a row for which the row waits: it is not planned before the value of its
last token is known, from which the next drafts are made."""
_RETRY_INTERVAL = 64
"""Number of plans after which rows without recent drafts wait once for the value of their last token, to try
drafts again."""


class Drafts(NamedTuple):
    """The draft tokens of some rows."""

    counts: Ints
    """Number of drafts of each row; empty: no row has drafts."""
    token_ids: Ints
    """All drafts, row by row; empty: the worker proposes them itself."""

    def padded(self, count: int) -> "Drafts":
        """Return the drafts with `count` more rows without drafts."""
        if not len(self.counts):
            return self
        return self._replace(counts=np.append(self.counts, np.zeros(count, np.int32)))

    def merged(self, others: "Drafts") -> "Drafts":
        """Return these drafts and the `others`, which are drafts of other rows."""
        if not len(self.counts) or not len(others.counts):
            return self if len(self.counts) else others
        counts = self.counts + others.counts
        is_own = np.repeat(self.counts > 0, counts)
        token_ids = np.empty(len(is_own), np.int32)
        token_ids[is_own], token_ids[~is_own] = self.token_ids, others.token_ids
        return Drafts(counts, token_ids)

    def of(self, rows: NDArray[np.bool_]) -> "Drafts":
        """Return the drafts of the selected rows; the other rows have no drafts."""
        return self._replace(counts=self.counts[rows]) if len(self.counts) else self


NO_DRAFTS = Drafts(_NONE, _NONE)


class Drafting:
    """Chooses the rows that get drafts, and records how many were accepted."""

    def __init__(
        self,
        draft_length: AdaptiveDraftLength,
        proposer: Proposer | None,
        *,
        max_drafts: int,
        ahead: bool = False,
        max_samples: int | None = None,
        max_drafts_of: Callable[[int], int] | None = None,
        max_len: int | None = None,
        vocab: int | None = None,
    ) -> None:
        """Build the drafter. Without a proposer the worker proposes drafts for each row that has sampled a
        token. If the worker runs `ahead` of the host, rows that need token values on the host get no drafts.
        `max_samples` limits the sampled positions of a step, with rows padded to a power of two.
        `max_drafts_of` maps a number of rows to the most drafts of each. Sequences have drafts up to
        `max_len` tokens. Proposed drafts are cut at ids beyond `vocab`."""
        self._max_drafts_of = max_drafts_of
        self._max_len = max_len
        self._vocab = vocab
        self._ahead = ahead
        self._max_samples = max_samples
        self._draft_length = draft_length
        self._proposer = proposer
        self._max_drafts_each = max_drafts
        self._known: dict[int, tuple[int, int]] = {}
        """By row: the number of its admission, and how many of its tokens the proposer has received."""
        self._num_plans = 0
        self._drafted_in: dict[int, int] = {}
        """By row: the last plan in which it had drafts."""
        self._has_forced = False
        """Whether the last step had draft tokens that grammars force."""
        self._has_sure_draft: set[int] = set()
        """Rows with a last proposal that is more likely to be right than ordinary ones
        (`Proposer.is_sure`)."""

    def draft(self, running: Running, chunks: Ints, budget: int) -> Drafts:
        """Return draft tokens, at most `budget` in all, for those rows of `running.order` that decode.
        `chunks` is the number of tokens that each row computes without drafts."""
        self._num_plans += 1
        rows = running.order
        decodes = (chunks == 1) & (running.num_tokens[rows] - running.num_computed[rows] == 1)
        max_drafts = self._max_drafts(running, rows)
        places = np.flatnonzero(decodes & self._may_draft(running, rows) & (max_drafts > 0))
        for row in rows[places].tolist():
            self._reset_if_new(running, row)
        proposals: list[Ints] = []
        if self._proposer is None:
            places = places[running.num_tokens[rows[places]] > running.first_len[rows[places]]]
            available = max_drafts[places]
        else:
            self._set_waits(running, rows, rows[places])
            places = places[running.num_tokens[rows[places]] == running.num_known[rows[places]]]
            limits = zip(rows[places].tolist(), max_drafts[places].tolist(), strict=True)
            proposals = [self._propose(running, row, count) for row, count in limits]
            available = np.array([len(proposal) for proposal in proposals], np.int32)
        if not available.any() or budget < 1:
            return NO_DRAFTS
        available_by_row, counts = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
        available_by_row[places] = available
        counts[decodes] = self._draft_length.lengths(
            self._rows_by_kind(rows[decodes]), available_by_row[decodes], budget
        )
        if not counts.any():
            return NO_DRAFTS
        drafted = rows[counts > 0]
        running.has_forced[drafted] = False
        self._drafted_in |= dict.fromkeys(drafted.tolist(), self._num_plans)
        if self._proposer is None:
            return Drafts(counts, _NONE)
        cut = [proposal[:count] for proposal, count in zip(proposals, counts[places].tolist(), strict=True)]
        return Drafts(counts, np.concatenate(cut).astype(np.int32))

    def _max_drafts(self, running: Running, rows: RowIds) -> Ints:
        """Return the maximum number of drafts that each row may have."""
        limit = running.limit[rows]
        if self._max_len is not None:
            limit = np.minimum(limit, self._max_len)
        max_each = self._max_drafts_each if self._max_drafts_of is None else self._max_drafts_of(len(rows))
        max_drafts: Ints = np.minimum(
            limit - running.num_tokens[rows] - running.num_drafts[rows] - 1, max_each
        )
        if self._ahead:
            max_drafts = np.minimum(max_drafts, self._max_drafts_before_min_len(running, rows))
        if self._max_samples is not None:
            max_drafts = np.minimum(
                max_drafts, self._max_samples // (1 << max(len(rows) - 1, 0).bit_length()) - 1
            )
        return max_drafts

    def _may_draft(self, running: Running, rows: RowIds) -> NDArray[np.bool_]:
        """Return for each row whether it may have drafts from the proposer or the worker."""
        may_draft: NDArray[np.bool_] = running.drafts[rows]
        if self._proposer is None:
            # The masks of drafts made by the worker are not known here.
            may_draft &= ~running.constrained[rows]
            if self._ahead:
                may_draft &= ~running.needs_value[rows]
        return may_draft

    def _rows_by_kind(self, rows: RowIds) -> RowIds:
        """Return the indices by which `AdaptiveDraftLength` tracks the acceptance of each row's drafts.
        Proposals that are sure (`Proposer.is_sure`) have an index of their own."""
        if self._proposer is None:
            return rows
        return rows * NUM_DRAFT_KINDS + np.array(
            [row in self._has_sure_draft for row in rows.tolist()], np.intp
        )

    def _max_drafts_before_min_len(self, running: Running, rows: RowIds) -> Ints:
        """Return the maximum number of drafts of each row for which `min_tokens` applies to all or none of
        them, however many are accepted. The worker does not know in time how many tokens a row has."""
        num_tokens, min_len = running.num_tokens[rows], running.min_len[rows]
        is_free = num_tokens >= min_len
        left: Ints = np.where(
            is_free, self._max_drafts_each, min_len - num_tokens - running.num_drafts[rows] - 1
        )
        return left

    def _reset_if_new(self, running: Running, row: int) -> None:
        """Reset the state of a row that has a new request."""
        admission = int(running.admission[row])
        if self._known.get(row, (0, 0))[0] != admission:
            self._known[row] = admission, 0
            self._draft_length.admit(row)

    def _set_waits(self, running: Running, all_rows: RowIds, rows: RowIds) -> None:
        """Set which rows wait until the value of their last token is known, from which drafts are made. A row
        without drafts lately does not wait, and is tried again every `_RETRY_INTERVAL` plans."""
        running.waits[all_rows] = False
        if self._num_plans % _RETRY_INTERVAL == 0:
            running.waits[rows] = True
        else:
            since = (self._num_plans - self._drafted_in.get(row, -_RECENT_PLANS) for row in rows.tolist())
            running.waits[rows] = [plans < _RECENT_PLANS for plans in since]

    def _propose(self, running: Running, row: int, max_drafts: int) -> Ints:
        assert self._proposer is not None
        length, (admission, num_sent) = int(running.num_known[row]), self._known[row]
        if not num_sent:
            self._proposer.admit(row, running.tokens[row, :length], running.request(row).cache_salt)
        elif num_sent < length:
            self._proposer.extend(row, running.tokens[row, num_sent:length])
        self._known[row] = admission, length
        proposal = self._proposer.propose(row, max_drafts)
        (self._has_sure_draft.add if self._proposer.is_sure else self._has_sure_draft.discard)(row)
        if not len(proposal):
            return proposal
        if self._vocab is not None and len(
            invalid := np.flatnonzero((proposal < 0) | (proposal >= self._vocab))
        ):
            return proposal[: invalid[0]]
        return proposal

    def release(self, running: Running, row: int) -> None:
        """Forget the drafting state of a row whose request has left it."""
        self._drafted_in.pop(row, None)
        if self._known.pop(row, (0, 0))[1] and self._proposer is not None:
            self._proposer.release(row, running.tokens[row, : running.num_known[row]])

    def learn(self, step_tokens: StepTokens, stats: StepStats) -> dict[str, int]:
        """Record how many drafts of each row a step accepted, also in `stats`. Return the number of draft
        tokens of each request, by request id. Tokens that grammars force are left out."""
        is_forced = step_tokens.running.has_forced[step_tokens.sampled]
        self._has_forced = len(step_tokens.num_drafts) > 0 and bool(step_tokens.num_drafts[is_forced].any())
        if not len(step_tokens.num_drafts):
            return {}
        if not len(planned := np.flatnonzero((step_tokens.num_drafts > 0) & ~is_forced)):
            return {}
        rows, num_drafts = step_tokens.sampled[planned], step_tokens.num_drafts[planned]
        num_accepted = step_tokens.result.counts[planned] - 1
        # A missing draft counts as a wrong one.
        self._draft_length.learn(self._rows_by_kind(rows), num_drafts, num_accepted)
        if len(step_tokens.result.drafted):
            num_drafts = step_tokens.result.drafted[planned]
            has_drafts = num_drafts > 0
            rows, num_accepted, num_drafts = (
                rows[has_drafts],
                num_accepted[has_drafts],
                num_drafts[has_drafts],
            )
        if not len(rows):
            return {}
        stats.num_drafts, stats.num_draft_tokens = len(rows), int(num_drafts.sum())
        stats.num_accepted_by_position = (
            (num_accepted[:, None] > np.arange(num_drafts.max())).sum(axis=0).tolist()
        )
        return dict(zip(step_tokens.running.ids[rows].tolist(), num_drafts.tolist(), strict=True))

    def record_time(self, flight: StepInFlight) -> None:
        """Record the duration of a step, for the estimated costs of drafts, if all its rows decode and the
        drafting method made all of its drafts."""
        plan = flight.plan
        if self._has_forced:
            return
        if len(plan.logit_rows) == plan.total_tokens and not plan.admitted:
            num_accepted = sum(flight.notes.stats.num_accepted_by_position)
            self._draft_length.record_time(plan.total_tokens, len(plan.rows), num_accepted, flight.seconds)
