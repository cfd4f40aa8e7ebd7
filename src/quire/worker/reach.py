"""How far tokens see ahead: those of an image whose vectors see each other in both directions."""

from collections.abc import Iterable, Mapping

import numpy as np

from quire.data.plan import Ints, StepPlan
from quire.worker.rows import Rows


def reach_of(plan: StepPlan, all_rows: Rows, places: Mapping[int, Iterable[tuple[int, int]]]) -> Ints | None:
    """[T] the last place of its sequence that each token of a step sees. `places` are by row the runs of
    tokens that see each other: first, and how many. None if there is none of those in the step."""
    found: Ints | None = None
    for row, end, count in zip(
        plan.rows.tolist(), np.cumsum(plan.num_tokens).tolist(), plan.num_tokens.tolist(), strict=True
    ):
        first = int(all_rows.num_computed[row])
        for start, length in places.get(row, ()):
            last = start + length
            if start >= first + count or last <= first:
                continue
            if found is None:
                found = _own_places(plan, all_rows)
            assert last <= first + count, "no step divides what sees itself in both directions"
            begin = end - count
            found[begin + max(start - first, 0) : begin + last - first] = last - 1
    return found


def _own_places(plan: StepPlan, all_rows: Rows) -> Ints:
    ends = np.cumsum(plan.num_tokens)
    before = all_rows.num_computed[plan.rows] - (ends - plan.num_tokens)
    own: Ints = (np.arange(plan.total_tokens) + np.repeat(before, plan.num_tokens)).astype(np.int32)
    return own
