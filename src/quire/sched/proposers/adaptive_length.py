"""AdaptiveDraftLength: the number of drafts that pays, by acceptance rates and measured step costs.

A step of B rows with M drafts takes c(B + M) seconds and yields B + G tokens, where G is the expected number
of accepted drafts. Each step uses the M with the most tokens per second, and the drafts most likely to be
accepted. Acceptance is learned by row, costs by rows and tokens per row.

Estimates can be wrong, so there is also a balance of gains and losses. A small part of the time of every
step is added to it; steps with drafts add or subtract their gain over a plain step. Below zero there are no
drafts, which bounds the loss on any workload. Rows for which drafts seem not to pay are tried only as often
as a second budget for trials allows, which fills equally slowly."""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire.data.step_plan import Ints
from quire.sched.running import RowIds

Floats = NDArray[np.float64]

BUDGET_SHARE = 0.01
"""Fraction of the time of all steps that drafts may lose, and that trials may cost."""
INITIAL_BALANCE = 2.0
"""Initial balance and trial budget, and limit of the trial budget, in plain steps (the time of a step without
drafts)."""
MAX_BALANCE = 64.0
"""Limit of the balance, in plain steps."""
TRIAL_LEN = 2
"""Maximum number of drafts of a row in a trial, which is a step with drafts that are not expected to pay."""
MIN_GAIN = 1.01
"""Drafts are used only if they are expected to multiply the tokens per second by at least this factor."""
REFRESH = 64
"""Number of steps with drafts after which a step without drafts is measured again."""
NUM_FIRST = 3
"""Number of first measurements of a cost, of which the lowest is used: disturbances only lengthen a step."""
_DECAY = 0.95
"""Factor by which the statistics of a row decay with each step in which the row has drafts."""
_DECAY_ALL = 0.98
"""Factor by which the statistics of all rows together decay for each row with drafts in a step."""
_PRIOR_WEIGHT = 2.0
"""Weight of the common acceptance rate of all rows in the estimate for one row, as a number of drafts."""
_LEVELS, _CUTS = 12, 48
"""Number of levels that acceptance rates are rounded to, and number of tried thresholds: a draft is used if
its likelihood of acceptance is above the threshold."""
_FEW_ROWS = 64
"""Maximum number of rows for which looking up each row is faster than multiplying with a histogram of the
rows."""
_STEPS = [1, 1.015625, 1.0625, 1.125, 1.25, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 19, 23, 27]
"""Ratios of tokens to rows of a step for which costs are kept; on a CPU, costs rise in steps of four
tokens."""
_RATIOS = np.array(_STEPS)
_PRIOR_SLOPE = 0.25
"""Assumed cost of one more token per row, in plain steps, until it is measured."""


class AdaptiveDraftLength:
    """Chooses the number of drafts of each row and learns from their acceptance."""

    def __init__(self, *, max_rows: int, max_drafts: int, num_kinds: int = 1) -> None:
        """Set the sizes. Each of `num_kinds` kinds of drafts has its own acceptance rates; kind k of a row is
        tracked as row * num_kinds + k."""
        self._max_drafts = max_drafts
        self._num_kinds = num_kinds
        self._rates = _AcceptanceRates(max_rows, num_kinds)
        self._level_of_row: NDArray[np.intp] = np.zeros(max_rows * num_kinds, np.intp)
        """Acceptance levels of a row's first draft and of its later drafts, as one index."""
        self._tested: NDArray[np.int64] = np.zeros(max_rows * num_kinds, np.int64)
        """Step in which a row last had drafts."""
        self._step = 0
        self._costs: dict[int, _Costs] = {}
        self._balance = self._trial_budget = 0.0
        self._reserved = 0.0
        """Cost reserved for the last trial; returned to the trial budget if the step had no drafts."""
        rates = (np.arange(_LEVELS) + 0.5) / _LEVELS
        likelihood = (rates[:, None, None] * rates[:, None] ** np.arange(max_drafts)).reshape(-1, max_drafts)
        is_drafted = likelihood >= np.geomspace(1.0, 0.005, _CUTS)[:, None, None]
        totals = np.stack([is_drafted, is_drafted * likelihood]).cumsum(3).reshape(2 * _CUTS, -1, max_drafts)
        self._table = np.pad(totals, ((0, 0), (0, 0), (1, 0))).reshape(2 * _CUTS, -1).astype(np.float32)
        """[2 * thresholds, levels * available drafts]: in the first half, the number of a row's drafts that
        are at least as likely as the threshold; in the second, how many of these are expected to be
        accepted."""

    def admit(self, row: int) -> None:
        """Reset the statistics of a row that gets a new request."""
        rows = np.arange(row * self._num_kinds, (row + 1) * self._num_kinds)
        self._rates.clear(rows)
        self._tested[rows] = 0
        self._update_levels(rows)

    def lengths(self, rows: Ints | RowIds, available: Ints | None = None, budget: int | None = None) -> Ints:
        """Return the number of drafts of each row that decodes in the next step: at most those available, and
        `budget` in total."""
        num_rows = len(rows)
        none = np.zeros(num_rows, np.int32)
        self._step += 1
        if num_rows == 0 or budget == 0:
            return none
        costs = self._costs_of(num_rows)
        if costs.is_due() or self._balance < 0:
            return none
        if available is None:
            available = np.full(num_rows, self._max_drafts, np.int32)
        available = np.minimum(available, self._max_drafts)
        lengths = self._best(costs, self._level_of_row.take(rows), available, budget)
        lengths = self._with_trials(costs, rows, lengths, available)
        if budget is not None and int(lengths.sum()) > budget:
            lengths = np.clip(budget - (np.cumsum(lengths) - lengths), 0, lengths)
        self._tested[rows[lengths > 0]] = self._step
        return lengths

    def learn(self, rows: Ints | RowIds, num_drafts: Ints, num_accepted: Ints) -> None:
        """Record how many drafts of these rows were accepted."""
        has_drafts = num_drafts > 0
        if not has_drafts.all():
            rows, num_drafts, num_accepted = (
                rows[has_drafts],
                num_drafts[has_drafts],
                num_accepted[has_drafts],
            )
        if len(rows):
            rows = rows.astype(np.intp)
            self._rates.learn(rows, num_drafts, num_accepted)
            self._update_levels(rows)

    def record_time(self, num_tokens: int, num_rows: int, num_accepted: int, seconds: float) -> None:
        """Record the duration of a step of decodes alone, and how many of its drafts were accepted."""
        costs = self._costs_of(num_rows)
        ratio, is_first = num_tokens / num_rows, not costs.plain
        cost_s = min(seconds, 2 * costs.plain * costs.at(ratio))
        costs.add(ratio, seconds)
        plain = costs.plain
        if is_first:
            if len(self._costs) == 1:
                self._balance = self._trial_budget = INITIAL_BALANCE * plain
            return
        if num_tokens == num_rows:
            self._trial_budget += self._reserved
        self._reserved = 0.0
        gain = plain * (1 + num_accepted / num_rows) - cost_s if num_tokens > num_rows else 0.0
        self._balance = min(self._balance + gain + BUDGET_SHARE * cost_s, MAX_BALANCE * plain)
        self._trial_budget = min(self._trial_budget + BUDGET_SHARE * cost_s, INITIAL_BALANCE * plain)

    def _update_levels(self, rows: RowIds) -> None:
        first, later = self._rates.levels(rows)
        self._level_of_row[rows] = first * _LEVELS + later

    def _costs_of(self, num_rows: int) -> "_Costs":
        at = int(8 * math.log2(num_rows))
        if at not in self._costs:
            nearest = min(self._costs, key=lambda other: abs(other - at), default=None)
            self._costs[at] = _Costs(None if nearest is None else self._costs[nearest])
        return self._costs[at]

    def _best(self, costs: "_Costs", levels: NDArray[np.intp], available: Ints, budget: int | None) -> Ints:
        """Return the number of drafts of each row with which the step yields the most tokens per second;
        zeros if drafts do not pay."""
        num_rows = len(levels)
        columns = levels * (self._max_drafts + 1) + available
        if num_rows <= _FEW_ROWS:
            totals = self._table[:, columns].sum(1)
        else:
            totals = self._table @ np.bincount(columns, minlength=self._table.shape[1]).astype(np.float32)
        num_drafts, num_accepted = totals[:_CUTS], totals[_CUTS:]
        if budget is not None and num_drafts[-1] > budget:
            excess = np.maximum(num_drafts / budget, 1.0)
            num_drafts, num_accepted = num_drafts / excess, num_accepted / excess
        score = (num_rows + num_accepted) / costs.curve(1 + num_drafts / num_rows)
        best = int(score.argmax())
        if score[best] < MIN_GAIN * num_rows:
            return np.zeros(num_rows, np.int32)
        lengths: Ints = self._table[best, columns].astype(np.int32)
        return lengths

    def _with_trials(self, costs: "_Costs", rows: Ints | RowIds, lengths: Ints, available: Ints) -> Ints:
        """Return `lengths` with additional drafts for rows without any, the longest untested first, as far as
        the trial budget allows."""
        is_idle = (lengths == 0) & (available > 0)
        if not is_idle.any():
            return lengths
        idle_places = np.flatnonzero(is_idle)
        num_rows, num_drafts = len(rows), int(lengths.sum())
        current_cost, count = costs.at(1 + num_drafts / num_rows), len(idle_places)
        while True:
            price = costs.plain * (costs.at(1 + (num_drafts + TRIAL_LEN * count) / num_rows) - current_cost)
            if price <= self._trial_budget:
                break
            if count == 1:
                if self._trial_budget < 0.99 * INITIAL_BALANCE * costs.plain:
                    return lengths
                break  # the trial budget is full already
            count //= 2
        self._trial_budget, self._reserved = self._trial_budget - price, price
        tried = idle_places[np.argsort(self._tested[rows[idle_places]], kind="stable")[:count]]
        lengths[tried] = available[tried].clip(0, TRIAL_LEN)
        return lengths


class _AcceptanceRates:
    """Acceptance rates of a row's first draft, and of later drafts if those before were accepted. Rows with
    little data use the rates of all rows for the same kind of drafts."""

    def __init__(self, max_rows: int, num_kinds: int) -> None:
        self._accepted, self._verified = (
            np.zeros((2, max_rows * num_kinds)),
            np.zeros((2, max_rows * num_kinds)),
        )
        self._kinds = np.arange(num_kinds)
        self._all_accepted, self._all_verified = np.full((2, num_kinds), 0.5), np.ones((2, num_kinds))

    def clear(self, rows: RowIds) -> None:
        self._accepted[:, rows] = self._verified[:, rows] = 0.0

    def levels(self, rows: RowIds) -> NDArray[np.intp]:
        """Return [2, rows]: the acceptance rate of each row's first draft and of its later drafts, rounded to
        a level from 0 to _LEVELS - 1."""
        common = (self._all_accepted / self._all_verified)[:, rows % len(self._kinds)]
        accepted = self._accepted[:, rows] + _PRIOR_WEIGHT * common
        level = (accepted * _LEVELS / (self._verified[:, rows] + _PRIOR_WEIGHT)).astype(np.intp)
        return np.minimum(level, _LEVELS - 1)

    def learn(self, rows: RowIds, num_drafts: Ints, num_accepted: Ints) -> None:
        first = np.minimum(num_accepted, 1)
        accepted = np.array([first, num_accepted - first], np.float64)
        verified = np.array([np.ones_like(first), np.minimum(num_accepted, num_drafts - 1)], np.float64)
        self._accepted[:, rows] = self._accepted[:, rows] * _DECAY + accepted
        self._verified[:, rows] = self._verified[:, rows] * _DECAY + verified
        is_kind = (rows % len(self._kinds))[:, None] == self._kinds
        num_per_kind = is_kind.sum(0)
        decay, divisor = _DECAY_ALL ** np.minimum(num_per_kind, 64), np.maximum(num_per_kind, 1)
        self._all_accepted = self._all_accepted * decay + accepted @ is_kind / divisor
        self._all_verified = self._all_verified * decay + verified @ is_kind / divisor


class _Costs:
    """Measured costs of steps, by their ratio of tokens to rows; there is an instance for each range of the
    number of rows."""

    def __init__(self, like: "_Costs | None") -> None:
        self.plain = 0.0
        """Seconds of a step without drafts; 0: unknown."""
        self._num_plain = 0
        self._since_plain = 0
        self._extra = [0.0] * len(_RATIOS)
        """By entry of _STEPS: additional duration over a step without drafts, as a multiple of that step's
        duration."""
        self._num_extra = [0] * len(_RATIOS)
        if like is not None:
            self._extra = list(like._extra)
            self._num_extra = [NUM_FIRST if num >= NUM_FIRST else 0 for num in like._num_extra]
        self._fill()

    def is_due(self) -> bool:
        """Whether a step without drafts has to be measured before drafts are used again."""
        return self._num_plain < NUM_FIRST or self._since_plain >= REFRESH

    def at(self, ratio: float) -> float:
        return float(np.interp(max(ratio, _RATIOS[1]), _RATIOS, self._filled)) if ratio > 1 else 1.0

    def curve(self, ratios: Floats) -> Floats:
        # The first draft may cost more than the next, as such a step uses other kernels.
        at_least = np.where(ratios > 1, np.maximum(ratios, _RATIOS[1]), 1.0)
        costs: Floats = np.interp(at_least, _RATIOS, self._filled)
        return costs

    def add(self, ratio: float, seconds: float) -> None:
        if ratio == 1:
            self._since_plain = 0
            self._num_plain += 1
            self.plain = _smooth(self.plain, seconds, self._num_plain)
        elif self.plain:
            self._since_plain += 1
            nearest = 1 + int(np.abs(_RATIOS[1:] - ratio).argmin())
            cost = max(seconds / self.plain, 1.0)
            extra = (cost - 1) * min((_RATIOS[nearest] - 1) / (ratio - 1), 2.0)
            self._num_extra[nearest] += 1
            self._extra[nearest] = _smooth(1 + self._extra[nearest], 1 + extra, self._num_extra[nearest]) - 1
            self._fill()

    def _fill(self) -> None:
        """Compute the costs at every ratio from ratios with `NUM_FIRST` or more measurements. Between two
        measured ratios the cost grows half as fast as on the line between them. Beyond the last it follows
        the line from a plain step. No cost exceeds that of more tokens."""
        known = [0, *(at for at, num in enumerate(self._num_extra) if num >= NUM_FIRST)]
        extra, last = self._extra, known[-1]
        slope = extra[last] / (_STEPS[last] - 1) if last else _PRIOR_SLOPE
        filled = [*extra[: last + 1], *(slope * (ratio - 1) for ratio in _STEPS[last + 1 :])]
        for low, high in pairwise(known):
            line = (extra[high] - extra[low]) / (_STEPS[high] - _STEPS[low])
            for at in range(low + 1, high):
                filled[at] = extra[low] + line * (_STEPS[at] - _STEPS[low]) / 2
        self._filled = 1 + np.minimum.accumulate(filled[::-1])[::-1]


def _smooth(old: float, new: float, num: int) -> float:
    """Return the moving average `old` updated by the value `new`; it changes slowly and is robust against
    outliers. For the first values, the result is their minimum."""
    if num <= NUM_FIRST:
        return min(old, new) if num > 1 else new
    return old + 0.1 * (min(max(new, 0.5 * old), 1.25 * old) - old)
