"""How far tokens see ahead: those of an image whose vectors see each other in both directions, or those of a
prompt that all do."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.data.plan import Ints, StepPlan
from quire.worker.rows import Rows


def reach_of(plan: StepPlan, all_rows: Rows) -> Ints | None:
    """[T] the last place of its sequence that each token of a step sees: its own, or that of the last one
    that it sees ahead. None if each sees to its own."""
    ends = np.cumsum(plan.num_tokens)
    before = ends - plan.num_tokens - all_rows.num_computed[plan.rows]
    own: Ints = (np.arange(plan.total_tokens) - np.repeat(before, plan.num_tokens)).astype(np.int32)
    found = own.copy()
    for place, row in enumerate(plan.rows.tolist()):
        for first, count in _together(row, all_rows):
            at, last = first + before[place], first + count - 1 + before[place]
            if last < ends[place] - plan.num_tokens[place] or at >= ends[place]:
                continue
            assert last < ends[place], "no step divides an item whose tokens all see each other"
            found[max(at, ends[place] - plan.num_tokens[place]) : last + 1] = first + count - 1
    return found if (found != own).any() else None


def _together(row: int, all_rows: Rows) -> Iterator[tuple[int, int]]:
    """The places of a row's tokens that see each other: first, and how many."""
    if row in all_rows.wholes:
        yield 0, all_rows.wholes[row]
        return
    for item in all_rows.items.get(row, ()):
        yield from item.places()


def both_ways(batch: Batch, window: int | None) -> Tensor:
    """[T] the same of a batch of whole prompts whose tokens see those behind them, too: to the last one, or
    as far as layers with this window look back."""
    lens = batch.query_lens_host
    reach = np.repeat(lens - 1, lens)
    if window is not None:
        own = np.arange(len(reach)) - np.repeat(np.cumsum(lens) - lens, lens)
        reach = np.minimum(own + window - 1, reach)
    return torch.from_numpy(reach.astype(np.int32)).to(batch.token_ids.device)
