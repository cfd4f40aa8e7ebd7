"""Bidirectional attention: how far tokens attend ahead, within an image or within a whole prompt."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.data.step_plan import Ints, StepPlan
from quire.worker.rows import Rows


def last_visible_of(plan: StepPlan, all_rows: Rows) -> Ints | None:
    """Return [T], the last position that each token of a step attends to: its own position, or that of the
    last token of its image or bidirectional prompt. None if all attention is causal."""
    ends = np.cumsum(plan.num_tokens)
    before = ends - plan.num_tokens - all_rows.num_computed[plan.rows]
    positions: Ints = (np.arange(plan.total_tokens) - np.repeat(before, plan.num_tokens)).astype(np.int32)
    last_visible = positions.copy()
    for place, row in enumerate(plan.rows.tolist()):
        for first, count in _bidirectional_spans(row, all_rows):
            at, last = first + before[place], first + count - 1 + before[place]
            if last < ends[place] - plan.num_tokens[place] or at >= ends[place]:
                continue
            assert last < ends[place], "a step must not split an item with bidirectional attention"
            last_visible[max(at, ends[place] - plan.num_tokens[place]) : last + 1] = first + count - 1
    return last_visible if (last_visible != positions).any() else None


def _bidirectional_spans(row: int, all_rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield the spans of a row's tokens that attend to each other in both directions, such as those of an
    image, as (first, count)."""
    if row in all_rows.num_bidirectional:
        yield 0, all_rows.num_bidirectional[row]
        return
    for item in all_rows.items.get(row, ()):
        yield from item.places()


def last_visible_in_prompts(batch: Batch, window: int | None) -> Tensor:
    """Return [T], the last position that each token attends to, in a batch of whole prompts with
    bidirectional attention. It is the prompt's last token, or as many tokens ahead as a sliding window
    reaches back."""
    lens = batch.query_lens_host
    last_visible = np.repeat(lens - 1, lens)
    if window is not None:
        positions = np.arange(len(last_visible)) - np.repeat(np.cumsum(lens) - lens, lens)
        last_visible = np.minimum(positions + window - 1, last_visible)
    return torch.from_numpy(last_visible.astype(np.int32)).to(batch.token_ids.device)
