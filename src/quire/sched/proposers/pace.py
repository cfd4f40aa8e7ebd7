"""How many drafts pay: by what became of the last ones, and by what a step was seen to cost.

A step of B rows with M drafts takes c(B + M) seconds and gives B + G tokens, where G is how many of the
drafts are expected to be right. The M that makes tokens per second most is chosen each step, and the drafts
are those with the best chances. Both sides are learned: chances by row, costs by rows and by tokens a row.

What was learned can be wrong, so there is an account besides. It gets a small part of the time of every step;
steps with drafts put in what they won against a plain step, and take out what they lost. Below zero there are
no drafts, which bounds the loss on any workload. Trials, of rows for which drafts seem not to pay, are as
rare as a purse allows that fills as slowly.
"""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire.data.plan import Ints
from quire.sched.running import RowIds

Floats = NDArray[np.float64]

INCOME = 0.01
"""Part of the time of all steps that drafts may lose, and that trials may cost."""
SAVINGS = 2.0
"""Plain steps that are in account and purse at first, and at most in the purse."""
MAX_PROFIT = 64.0
"""Plain steps that the account holds at most."""
TRIAL_LEN = 2
WORTH = 1.01
"""Gain from which on drafts are worth it."""
REFRESH = 64
"""Steps with drafts after which a plain one is measured."""
NUM_FIRST = 3
"""First measurements, of which the least counts: what disturbs a step makes it longer."""
_FORGET = 0.95
"""What is left of a row's evidence after each draft."""
_FORGET_ALL = 0.98
_PRIOR_WEIGHT = 2.0
_LEVELS, _CUTS = 12, 48
"""Of a chance; and of how likely a draft must be."""
_FEW_ROWS = 64
"""For which it is quicker to look each up than to count them first."""
_STEPS = [1, 1.015625, 1.0625, 1.125, 1.25, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 19, 23, 27]
"""Tokens a row at which costs are kept: a CPU's are stairs, of four tokens each."""
_RATIOS = np.array(_STEPS)
_PRIOR_SLOPE = 0.25
"""What a token more for each row costs, in plain steps, until it was measured."""


class Pace:
    """Chooses the drafts of each row, and learns from what became of them."""

    def __init__(self, *, max_rows: int, most: int, sorts: int = 1) -> None:
        """Drafts are of several `sorts`, some likelier than others: those of sort s are known here by a row
        of their own, row * sorts + s."""
        self._most = most
        self._sorts = sorts
        self._chances = _Chances(max_rows, sorts)
        self._levels: NDArray[np.intp] = np.zeros(max_rows * sorts, np.intp)
        """Of both chances of a row."""
        self._tested: NDArray[np.int64] = np.zeros(max_rows * sorts, np.int64)
        """When a row last had drafts."""
        self._step = 0
        self._costs: dict[int, _Costs] = {}
        self._account = self._purse = 0.0
        self._reserved = 0.0
        """What the last trial may cost; it goes back into the purse if nobody had an idea what to try."""
        chances = (np.arange(_LEVELS) + 0.5) / _LEVELS
        likely = (chances[:, None, None] * chances[:, None] ** np.arange(most)).reshape(-1, most)
        taken = likely >= np.geomspace(1.0, 0.005, _CUTS)[:, None, None]
        sums = np.stack([taken, taken * likely]).cumsum(3).reshape(2 * _CUTS, -1, most)
        self._table = np.pad(sums, ((0, 0), (0, 0), (1, 0))).reshape(2 * _CUTS, -1).astype(np.float32)
        """[2 * cut, level * available]: how many of the drafts that a row with such chances has are as likely
        as the cut or more; and, behind those, how many of them are right."""

    def admit(self, row: int) -> None:
        """A request takes a row, and nothing is known of it."""
        rows = np.arange(row * self._sorts, (row + 1) * self._sorts)
        self._chances.clear(rows)
        self._tested[rows] = 0
        self._note(rows)

    def lengths(self, rows: Ints | RowIds, available: Ints | None = None, budget: int | None = None) -> Ints:
        """The drafts that each of these rows is to have, all that decode in the next step: as many as there
        are, and `budget` in all, at most."""
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
        """So many drafts of these rows were accepted."""
        has = num_drafts > 0
        if not has.all():
            rows, num_drafts, num_accepted = rows[has], num_drafts[has], num_accepted[has]
        if len(rows):
            rows = rows.astype(np.intp)
            self._chances.learn(rows, num_drafts, num_accepted)
            self._note(rows)

    def timed(self, num_tokens: int, num_rows: int, num_accepted: int, seconds: float) -> None:
        """A step of decodes alone took so long; of its drafts so many were accepted."""
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

    def _note(self, rows: RowIds) -> None:
        first, later = self._chances.levels(rows)
        self._levels[rows] = first * _LEVELS + later

    def _costs_of(self, num_rows: int) -> "_Costs":
        at = int(8 * math.log2(num_rows))
        if at not in self._costs:
            near = min(self._costs, key=lambda other: abs(other - at), default=None)
            self._costs[at] = _Costs(None if near is None else self._costs[near])
        return self._costs[at]

    def _best(self, costs: "_Costs", levels: NDArray[np.intp], available: Ints, budget: int | None) -> Ints:
        """The drafts of each row that make tokens per second most."""
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
        """With drafts for rows that have none, those first that had none for longest: as many as the purse
        can pay for."""
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
                break  # it will not get fuller
            count //= 2
        self._purse, self._reserved = self._purse - price, price
        tried = idle[np.argsort(self._tested[rows[idle]], kind="stable")[:count]]
        lengths[tried] = available[tried].clip(0, TRIAL_LEN)
        return lengths


class _Chances:
    """How often the first draft of a row was right lately, and any other if those before it were: by row, and
    over all rows of a sort for those of which little is known."""

    def __init__(self, max_rows: int, sorts: int) -> None:
        self._right, self._seen = np.zeros((2, max_rows * sorts)), np.zeros((2, max_rows * sorts))
        self._sorts = np.arange(sorts)
        self._all_right, self._all_seen = np.full((2, sorts), 0.5), np.ones((2, sorts))

    def clear(self, rows: RowIds) -> None:
        self._right[:, rows] = self._seen[:, rows] = 0.0

    def levels(self, rows: RowIds) -> NDArray[np.intp]:
        """[2, rows]: of _LEVELS, the one that each chance is at."""
        common = (self._all_right / self._all_seen)[:, rows % len(self._sorts)]
        right = self._right[:, rows] + _PRIOR_WEIGHT * common
        level = (right * _LEVELS / (self._seen[:, rows] + _PRIOR_WEIGHT)).astype(np.intp)
        return np.minimum(level, _LEVELS - 1)

    def learn(self, rows: RowIds, num_drafts: Ints, num_accepted: Ints) -> None:
        first = np.minimum(num_accepted, 1)
        right = np.array([first, num_accepted - first], np.float64)
        seen = np.array([np.ones_like(first), np.minimum(num_accepted, num_drafts - 1)], np.float64)
        self._right[:, rows] = self._right[:, rows] * _FORGET + right
        self._seen[:, rows] = self._seen[:, rows] * _FORGET + seen
        is_of = (rows % len(self._sorts))[:, None] == self._sorts
        num_of = is_of.sum(0)
        forget, each = _FORGET_ALL ** np.minimum(num_of, 64), np.maximum(num_of, 1)
        self._all_right = self._all_right * forget + right @ is_of / each
        self._all_seen = self._all_seen * forget + seen @ is_of / each


class _Costs:
    """What steps of about so many rows cost, by their tokens a row."""

    def __init__(self, like: "_Costs | None") -> None:
        self.plain = 0.0
        """Seconds of a plain step; 0: not known."""
        self._num_plain = 0
        self._since_plain = 0
        self._extra = [0.0] * len(_RATIOS)
        """What steps cost beside a plain one, in plain ones."""
        self._num_extra = [0] * len(_RATIOS)
        if like is not None:
            self._extra = list(like._extra)
            self._num_extra = [NUM_FIRST if num >= NUM_FIRST else 0 for num in like._num_extra]
        self._fill()

    def is_due(self) -> bool:
        """Whether a plain step is to be measured."""
        return self._num_plain < NUM_FIRST or self._since_plain >= REFRESH

    def at(self, ratio: float) -> float:
        return float(np.interp(max(ratio, _RATIOS[1]), _RATIOS, self._filled)) if ratio > 1 else 1.0

    def curve(self, ratios: Floats) -> Floats:
        # The first draft may cost more than the next: it is another kind of step.
        at_least = np.where(ratios > 1, np.maximum(ratios, _RATIOS[1]), 1.0)
        found: Floats = np.interp(at_least, _RATIOS, self._filled)
        return found

    def add(self, ratio: float, seconds: float) -> None:
        if ratio == 1:
            self._since_plain = 0
            self._num_plain += 1
            self.plain = _steady(self.plain, seconds, self._num_plain)
        elif self.plain:
            self._since_plain += 1
            near = 1 + int(np.abs(_RATIOS[1:] - ratio).argmin())
            cost = max(seconds / self.plain, 1.0)
            extra = (cost - 1) * min((_RATIOS[near] - 1) / (ratio - 1), 2.0)
            self._num_extra[near] += 1
            self._extra[near] = _steady(1 + self._extra[near], 1 + extra, self._num_extra[near]) - 1
            self._fill()

    def _fill(self) -> None:
        """Costs at every ratio. What was not measured (the first steps of a kind do not count: they are
        computed in other ways) is, between two that were, between the lower of them and the line to the
        higher; and behind all in the line from a plain step. None is above one of more tokens."""
        known = [0, *(at for at, num in enumerate(self._num_extra) if num >= NUM_FIRST)]
        extra, last = self._extra, known[-1]
        slope = extra[last] / (_STEPS[last] - 1) if last else _PRIOR_SLOPE
        filled = [*extra[: last + 1], *(slope * (ratio - 1) for ratio in _STEPS[last + 1 :])]
        for low, high in pairwise(known):
            line = (extra[high] - extra[low]) / (_STEPS[high] - _STEPS[low])
            for at in range(low + 1, high):
                filled[at] = extra[low] + line * (_STEPS[at] - _STEPS[low]) / 2
        self._filled = 1 + np.minimum.accumulate(filled[::-1])[::-1]


def _steady(old: float, new: float, num: int) -> float:
    """A mean that follows slowly, of numbers some of which are far too large; the least of the first."""
    if num <= NUM_FIRST:
        return min(old, new) if num > 1 else new
    return old + 0.1 * (min(max(new, 0.5 * old), 1.25 * old) - old)
