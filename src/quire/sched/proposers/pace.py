"""Pace: the number of drafts that pays, by acceptance rates and measured step costs.

A step of B rows with M drafts takes c(B + M) seconds and yields B + G tokens, where G is the expected number
of accepted drafts. Each step uses the M with the most tokens per second, and the drafts most likely to be
accepted. Acceptance is learned by row, costs by rows and tokens per row.

Estimates can be wrong, so there is also an account. A small part of the time of every step is added to it;
steps with drafts add or subtract their gain over a plain step. Below zero there are no drafts, which bounds
the loss on any workload. Rows for which drafts seem not to pay are tried as rarely as a second, equally slow
budget (the purse) allows."""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire.data.step_plan import Ints
from quire.sched.running import RowIds

Floats = NDArray[np.float64]

INCOME = 0.01
"""Part of the time of all steps that drafts may lose, and that trials may cost."""
SAVINGS = 2.0
"""Initial balance of account and purse, and limit of the purse, in plain steps."""
MAX_PROFIT = 64.0
"""Limit of the account, in plain steps."""
TRIAL_LEN = 2
WORTH = 1.01
"""Gain from which on drafts are worth it."""
REFRESH = 64
"""Steps with drafts after which a plain one is measured."""
NUM_FIRST = 3
"""Number of first measurements, of which the least counts: disturbances only lengthen a step."""
_DECAY = 0.95
"""Decay of a row's statistics per draft."""
_DECAY_ALL = 0.98
_PRIOR_WEIGHT = 2.0
_LEVELS, _CUTS = 12, 48
"""Number of acceptance levels, and of thresholds for the likelihood of a draft."""
_FEW_ROWS = 64
"""Up to this number of rows, single lookups are faster than a histogram."""
_STEPS = [1, 1.015625, 1.0625, 1.125, 1.25, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 19, 23, 27]
"""Tokens per row at which costs are kept; on a CPU, costs rise in steps of four tokens."""
_RATIOS = np.array(_STEPS)
_PRIOR_SLOPE = 0.25
"""Assumed cost of one more token per row, in plain steps, until it is measured."""


class Pace:
    """Chooses the number of drafts of each row and learns from their acceptance."""

    def __init__(self, *, max_rows: int, most: int, sorts: int = 1) -> None:
        """Build the pace. Drafts of several `sorts` have different acceptance; sort s of a row is tracked as
        row * sorts + s."""
        self._most = most
        self._sorts = sorts
        self._chances = _Chances(max_rows, sorts)
        self._levels: NDArray[np.intp] = np.zeros(max_rows * sorts, np.intp)
        """Both acceptance levels of a row, as one index."""
        self._tested: NDArray[np.int64] = np.zeros(max_rows * sorts, np.int64)
        """Step in which a row last had drafts."""
        self._step = 0
        self._costs: dict[int, _Costs] = {}
        self._account = self._purse = 0.0
        self._reserved = 0.0
        """Cost reserved for the last trial; returned to the purse if the step had no drafts."""
        chances = (np.arange(_LEVELS) + 0.5) / _LEVELS
        likely = (chances[:, None, None] * chances[:, None] ** np.arange(most)).reshape(-1, most)
        taken = likely >= np.geomspace(1.0, 0.005, _CUTS)[:, None, None]
        sums = np.stack([taken, taken * likely]).cumsum(3).reshape(2 * _CUTS, -1, most)
        self._table = np.pad(sums, ((0, 0), (0, 0), (1, 0))).reshape(2 * _CUTS, -1).astype(np.float32)
        """[2 * cut, level * available]: number of a row's drafts at least as likely as the cut and, in the
        second half, the expected number of accepted ones."""

    def admit(self, row: int) -> None:
        """Reset the statistics of a row that gets a new request."""
        rows = np.arange(row * self._sorts, (row + 1) * self._sorts)
        self._chances.clear(rows)
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
        if costs.is_due() or self._account < 0:
            return none
        if available is None:
            available = np.full(num_rows, self._most, np.int32)
        available = np.minimum(available, self._most)
        lengths = self._best(costs, self._levels.take(rows), available, budget)
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
            self._chances.learn(rows, num_drafts, num_accepted)
            self._update_levels(rows)

    def timed(self, num_tokens: int, num_rows: int, num_accepted: int, seconds: float) -> None:
        """Record the duration of a step of decodes alone, and how many of its drafts were accepted."""
        costs = self._costs_of(num_rows)
        ratio, is_first = num_tokens / num_rows, not costs.plain
        took = min(seconds, 2 * costs.plain * costs.at(ratio))
        costs.add(ratio, seconds)
        plain = costs.plain
        if is_first:
            if len(self._costs) == 1:
                self._account = self._purse = SAVINGS * plain
            return
        if num_tokens == num_rows:
            self._purse += self._reserved
        self._reserved = 0.0
        won = plain * (1 + num_accepted / num_rows) - took if num_tokens > num_rows else 0.0
        self._account = min(self._account + won + INCOME * took, MAX_PROFIT * plain)
        self._purse = min(self._purse + INCOME * took, SAVINGS * plain)

    def _update_levels(self, rows: RowIds) -> None:
        first, later = self._chances.levels(rows)
        self._levels[rows] = first * _LEVELS + later

    def _costs_of(self, num_rows: int) -> "_Costs":
        at = int(8 * math.log2(num_rows))
        if at not in self._costs:
            near = min(self._costs, key=lambda other: abs(other - at), default=None)
            self._costs[at] = _Costs(None if near is None else self._costs[near])
        return self._costs[at]

    def _best(self, costs: "_Costs", levels: NDArray[np.intp], available: Ints, budget: int | None) -> Ints:
        """Return the numbers of drafts with the most tokens per second."""
        num_rows = len(levels)
        kinds = levels * (self._most + 1) + available
        if num_rows <= _FEW_ROWS:
            both = self._table[:, kinds].sum(1)
        else:
            both = self._table @ np.bincount(kinds, minlength=self._table.shape[1]).astype(np.float32)
        num, gained = both[:_CUTS], both[_CUTS:]
        if budget is not None and num[-1] > budget:
            over = np.maximum(num / budget, 1.0)
            num, gained = num / over, gained / over
        score = (num_rows + gained) / costs.curve(1 + num / num_rows)
        best = int(score.argmax())
        if score[best] < WORTH * num_rows:
            return np.zeros(num_rows, np.int32)
        lengths: Ints = self._table[best, kinds].astype(np.int32)
        return lengths

    def _with_trials(self, costs: "_Costs", rows: Ints | RowIds, lengths: Ints, available: Ints) -> Ints:
        """Add drafts for rows without any, those untested for longest first, as far as the purse allows."""
        is_idle = (lengths == 0) & (available > 0)
        if not is_idle.any():
            return lengths
        idle = np.flatnonzero(is_idle)
        num_rows, taken = len(rows), int(lengths.sum())
        before, count = costs.at(1 + taken / num_rows), len(idle)
        while True:
            price = costs.plain * (costs.at(1 + (taken + TRIAL_LEN * count) / num_rows) - before)
            if price <= self._purse:
                break
            if count == 1:
                if self._purse < 0.99 * SAVINGS * costs.plain:
                    return lengths
                break  # the purse is full already
            count //= 2
        self._purse, self._reserved = self._purse - price, price
        tried = idle[np.argsort(self._tested[rows[idle]], kind="stable")[:count]]
        lengths[tried] = available[tried].clip(0, TRIAL_LEN)
        return lengths


class _Chances:
    """Acceptance rates of a row's first draft, and of later drafts if those before were accepted. Rows with
    little data use the rates of all rows of a sort."""

    def __init__(self, max_rows: int, sorts: int) -> None:
        self._accepted, self._verified = np.zeros((2, max_rows * sorts)), np.zeros((2, max_rows * sorts))
        self._sorts = np.arange(sorts)
        self._all_accepted, self._all_verified = np.full((2, sorts), 0.5), np.ones((2, sorts))

    def clear(self, rows: RowIds) -> None:
        self._accepted[:, rows] = self._verified[:, rows] = 0.0

    def levels(self, rows: RowIds) -> NDArray[np.intp]:
        """Return [2, rows]: the level, below _LEVELS, of each rate."""
        common = (self._all_accepted / self._all_verified)[:, rows % len(self._sorts)]
        right = self._accepted[:, rows] + _PRIOR_WEIGHT * common
        level = (right * _LEVELS / (self._verified[:, rows] + _PRIOR_WEIGHT)).astype(np.intp)
        return np.minimum(level, _LEVELS - 1)

    def learn(self, rows: RowIds, num_drafts: Ints, num_accepted: Ints) -> None:
        first = np.minimum(num_accepted, 1)
        right = np.array([first, num_accepted - first], np.float64)
        seen = np.array([np.ones_like(first), np.minimum(num_accepted, num_drafts - 1)], np.float64)
        self._accepted[:, rows] = self._accepted[:, rows] * _DECAY + right
        self._verified[:, rows] = self._verified[:, rows] * _DECAY + seen
        is_sort = (rows % len(self._sorts))[:, None] == self._sorts
        num_per_sort = is_sort.sum(0)
        decay, divisor = _DECAY_ALL ** np.minimum(num_per_sort, 64), np.maximum(num_per_sort, 1)
        self._all_accepted = self._all_accepted * decay + right @ is_sort / divisor
        self._all_verified = self._all_verified * decay + seen @ is_sort / divisor


class _Costs:
    """Costs of steps of similar row counts, by tokens per row."""

    def __init__(self, like: "_Costs | None") -> None:
        self.plain = 0.0
        """Seconds of a plain step; 0: unknown."""
        self._num_plain = 0
        self._since_plain = 0
        self._extra = [0.0] * len(_RATIOS)
        """Additional cost of steps over a plain one, in plain steps."""
        self._num_extra = [0] * len(_RATIOS)
        if like is not None:
            self._extra = list(like._extra)
            self._num_extra = [NUM_FIRST if num >= NUM_FIRST else 0 for num in like._num_extra]
        self._fill()

    def is_due(self) -> bool:
        """Whether a plain step has to be measured."""
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
            near = 1 + int(np.abs(_RATIOS[1:] - ratio).argmin())
            cost = max(seconds / self.plain, 1.0)
            extra = (cost - 1) * min((_RATIOS[near] - 1) / (ratio - 1), 2.0)
            self._num_extra[near] += 1
            self._extra[near] = _smooth(1 + self._extra[near], 1 + extra, self._num_extra[near]) - 1
            self._fill()

    def _fill(self) -> None:
        """Compute the costs at every ratio; the first measurements of a kind do not count. Between two
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
    """Return a slow moving average that is robust against outliers; of the first values the least."""
    if num <= NUM_FIRST:
        return min(old, new) if num > 1 else new
    return old + 0.1 * (min(max(new, 0.5 * old), 1.25 * old) - old)
