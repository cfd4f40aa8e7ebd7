"""How many drafts pay: by what became of the last ones, and by what a step was seen to cost.

A step of B rows with M drafts takes c(B + M) seconds and gives B + G tokens, where G is how many of the drafts
are expected to be right. The M that makes tokens per second most is chosen each step, and the drafts are those
with the best chances. Both sides are learned: chances by row, costs by number of rows and of tokens a row.

What was learned can be wrong, so there is an account besides. It gets a small part of the time of every step;
steps with drafts put in what they won against a plain step, and take out what they lost. Below zero there are
no drafts, which bounds the loss on any workload. Trials, of rows for which drafts seem not to pay, are paid out
of a purse that fills as slowly.
"""

import math

import numpy as np
from numpy.typing import NDArray

from quire.data.plan import Ints

Floats = NDArray[np.float64]

INCOME = 0.01
"""Part of the time of a step that losses may take, and as much again that trials may."""
SAVINGS = 4.0
"""Plain steps that account and purse hold at most, and at first."""
TRIAL_LEN = 2
WORTH = 1.01
"""Gain from which on drafts are worth it."""
REFRESH = 64
"""Steps with drafts after which a plain one is measured."""
NUM_FIRST = 3
"""First measurements, of which the least counts: what disturbs a step makes it longer."""
_FORGET = 0.9
"""What is left of a row's evidence after each draft."""
_FORGET_ALL = 0.98
_PRIOR_WEIGHT = 2.0
_LEVELS = 16
"""Of a chance."""
_RATIOS = (1.0, 1.0625, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 13.0, 19.0, 27.0)
"""Tokens a row at which costs are kept."""
_PRIOR_SLOPE = 0.25
"""What a token more for each row costs, in plain steps, until it was measured."""


class Pace:
    """Chooses the drafts of each row, and learns from what became of them."""

    def __init__(self, *, max_rows: int, most: int) -> None:
        self._most = most
        # By row, and over all in the last place: how often the first draft was right, how often a later one
        # was if those before it were, and how often each was seen.
        self._right: Floats = np.zeros((2, max_rows + 1))
        self._seen: Floats = np.zeros((2, max_rows + 1))
        self._right[:, -1], self._seen[:, -1] = 0.5, 1.0
        self._tested: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        """When a row last had drafts."""
        self._step = 0
        self._costs: dict[int, _Costs] = {}
        self._account = self._purse = 0.0
        levels = (np.arange(_LEVELS) + 0.5) / _LEVELS
        gains = levels[:, None, None] * levels[None, :, None] ** np.arange(most)
        flat = gains.ravel()
        self._order = np.argsort(-flat, kind="stable")
        """Drafts of all kinds (chances, and place in the draft), the most likely first."""
        self._gains = flat[self._order]
        bounds = np.geomspace(1.0, 0.005, 64)
        self._cuts = np.unique(np.searchsorted(-self._gains, -bounds, "right"))
        """The numbers of kinds that may be taken."""

    def admit(self, row: int) -> None:
        """A request takes a row, and nothing is known of it."""
        self._right[:, row] = self._seen[:, row] = 0.0
        self._tested[row] = 0

    def lengths(self, rows: Ints, available: Ints | None = None, budget: int | None = None) -> Ints:
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
        caps = np.full(num_rows, self._most) if available is None else np.minimum(available, self._most)
        levels = self._levels(rows)
        kinds, taken = self._best(costs, levels, caps, num_rows, budget)
        lengths = none if kinds == 0 else np.minimum(taken[levels], caps)
        lengths = self._with_trials(costs, rows, lengths, caps)
        if budget is not None and int(lengths.sum()) > budget:
            lengths = np.clip(budget - (np.cumsum(lengths) - lengths), 0, lengths)
        self._tested[rows[lengths > 0]] = self._step
        return lengths.astype(np.int32)

    def learn(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        """So many drafts of these rows were accepted."""
        has = num_drafts > 0
        if not has.any():
            return
        rows, drafts, accepted = rows[has], num_drafts[has], num_accepted[has]
        seen = np.stack([np.ones(len(rows)), np.minimum(accepted, drafts - 1)])
        seen[1] -= (accepted == 0) * 0.0
        right = np.stack([(accepted > 0).astype(np.float64), np.maximum(accepted - 1, 0)])
        for table, news in ((self._right, right), (self._seen, seen)):
            table[:, rows] = table[:, rows] * _FORGET + news
            kept = _FORGET_ALL ** min(len(rows), 64)
            table[:, -1] = table[:, -1] * kept + news.sum(1) * (1 - kept) / (1 - _FORGET_ALL) / len(rows)

    def timed(self, num_tokens: int, num_rows: int, num_accepted: int, seconds: float) -> None:
        """A step of decodes alone took so long; of its drafts so many were accepted."""
        costs = self._costs_of(num_rows)
        before = costs.plain
        costs.add(num_tokens / num_rows, seconds)
        plain = costs.plain
        if not before:
            self._account = self._purse = SAVINGS * plain
            return
        took = min(seconds, 2 * plain * costs.at(num_tokens / num_rows))
        won = plain * (1 + num_accepted / num_rows) - took if num_tokens > num_rows else 0.0
        self._account = min(self._account + won + INCOME * took, SAVINGS * plain)
        self._purse = min(self._purse + INCOME * took, SAVINGS * plain)

    def _costs_of(self, num_rows: int) -> "_Costs":
        at = int(8 * math.log2(num_rows))
        if at not in self._costs:
            near = min(self._costs, key=lambda other: abs(other - at), default=None)
            self._costs[at] = _Costs(None if near is None else self._costs[near])
        return self._costs[at]

    def _levels(self, rows: Ints) -> NDArray[np.intp]:
        """Which chances each row has."""
        common = self._right[:, -1:] / self._seen[:, -1:]
        chance = (self._right[:, rows] + _PRIOR_WEIGHT * common) / (self._seen[:, rows] + _PRIOR_WEIGHT)
        first, later = np.minimum((chance * _LEVELS).astype(np.intp), _LEVELS - 1)
        return first * _LEVELS + later

    def _best(
        self, costs: "_Costs", levels: NDArray[np.intp], caps: Ints, num_rows: int, budget: int | None
    ) -> tuple[int, Ints]:
        """How many kinds of drafts are taken, and what that makes of each level: how many places."""
        width = self._most + 1
        counts = np.bincount(levels * width + caps, minlength=_LEVELS**2 * width).reshape(-1, width)
        reach = counts[:, :0:-1].cumsum(1)[:, ::-1].ravel()[self._order]
        num_drafts = np.concatenate(([0], reach.cumsum()))[self._cuts]
        gained = np.concatenate(([0.0], (reach * self._gains).cumsum()))[self._cuts]
        if budget is not None:
            over = np.maximum(num_drafts / budget, 1.0)
            num_drafts, gained = num_drafts / over, gained / over
        score = (num_rows + gained) / costs.curve(1 + num_drafts / num_rows)
        best = int(score.argmax())
        if score[best] < WORTH * num_rows:
            return 0, _NONE
        kinds = int(self._cuts[best])
        return kinds, np.bincount(self._order[:kinds] // self._most, minlength=_LEVELS**2)

    def _with_trials(self, costs: "_Costs", rows: Ints, lengths: Ints, caps: Ints) -> Ints:
        """With drafts for rows that have none, those first that had none for longest: as many as the purse
        can pay for."""
        idle = np.flatnonzero((lengths == 0) & (caps > 0))
        if not len(idle):
            return lengths
        num_rows, taken = len(rows), int(lengths.sum())
        before, count = costs.at(1 + taken / num_rows), len(idle)
        while count:
            price = costs.plain * (costs.at(1 + (taken + TRIAL_LEN * count) / num_rows) - before)
            if price <= self._purse:
                break
            count //= 2
        if not count:
            return lengths
        self._purse -= price
        tried = idle[np.argsort(self._tested[rows[idle]], kind="stable")[:count]]
        lengths = lengths.copy()
        lengths[tried] = np.minimum(caps[tried], TRIAL_LEN)
        return lengths


_NONE: Ints = np.empty(0, np.int32)


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
            self._extra, self._num_extra = list(like._extra), [min(num, 1) for num in like._num_extra]
        self._fill()

    def is_due(self) -> bool:
        """Whether a plain step is to be measured."""
        return self._num_plain < NUM_FIRST or self._since_plain >= REFRESH

    def at(self, ratio: float) -> float:
        return float(self.curve(np.array([ratio]))[0])

    def curve(self, ratios: Floats) -> Floats:
        return np.interp(ratios, _RATIOS, self._filled)

    def add(self, ratio: float, seconds: float) -> None:
        if ratio == 1:
            self._since_plain = 0
            self._num_plain += 1
            self.plain = _steady(self.plain, seconds, self._num_plain)
        elif self.plain:
            self._since_plain += 1
            near = min(range(1, len(_RATIOS)), key=lambda at: abs(_RATIOS[at] - ratio))
            cost = max(seconds / self.plain, 1.0)
            extra = (cost - 1) * (_RATIOS[near] - 1) / (ratio - 1)
            self._num_extra[near] += 1
            self._extra[near] = _steady(1 + self._extra[near], 1 + extra, self._num_extra[near]) - 1
            self._fill()

    def _fill(self) -> None:
        """Costs at every ratio: rising, between what was measured in a line, behind it in the line from
        a plain step."""
        known = [0, *(at for at, num in enumerate(self._num_extra) if num)]
        last = known[-1]
        slope = self._extra[last] / (_RATIOS[last] - 1) if last else _PRIOR_SLOPE
        filled = np.interp(_RATIOS, [_RATIOS[at] for at in known], [self._extra[at] for at in known])
        filled[last + 1 :] = slope * (np.array(_RATIOS[last + 1 :]) - 1)
        self._filled = 1 + np.maximum.accumulate(filled)


def _steady(old: float, new: float, num: int) -> float:
    """A mean that follows slowly, of numbers some of which are far too large; the least of the first."""
    if num <= NUM_FIRST:
        return min(old, new) if num > 1 else new
    return old + 0.1 * (min(max(new, 0.5 * old), 1.25 * old) - old)
