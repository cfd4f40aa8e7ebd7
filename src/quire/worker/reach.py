"""How far tokens see ahead: those of an image whose vectors see each other in both directions."""

import numpy as np

from quire.data.plan import Ints, StepPlan
from quire.worker.rows import Rows


def reach_of(plan: StepPlan, all_rows: Rows) -> Ints | None:
    """[T] the last place of its sequence that each token of a step sees: its own, or that of the last vector
    beside its own. None if no item has vectors in the step."""
    ends = np.cumsum(plan.num_tokens)
    before = ends - plan.num_tokens - all_rows.num_computed[plan.rows]
    own: Ints = (np.arange(plan.total_tokens) - np.repeat(before, plan.num_tokens)).astype(np.int32)
    found = own.copy()
    for place, row in enumerate(plan.rows.tolist()):
        for item in all_rows.items.get(row, ()):
            for first, count in item.places():
                at, last = first + before[place], first + count - 1 + before[place]
                if last < ends[place] - plan.num_tokens[place] or at >= ends[place]:
                    continue
                assert last < ends[place], "no step divides an item whose tokens all see each other"
                found[max(at, ends[place] - plan.num_tokens[place]) : last + 1] = first + count - 1
    return found if (found != own).any() else None
