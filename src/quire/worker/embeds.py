"""Prompts that came as vectors: those that a step computes."""

import numpy as np
import torch
from torch import Tensor

from quire.data.plan import StepPlan
from quire.sampling.transfer import to_device
from quire.worker.rows import Rows


def take_embeds(plan: StepPlan, all_rows: Rows, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """[K] the tokens of a step that have vectors in place of ids, and [K, hidden] those; None if there are
    none. What a row has computed of them it does not need again."""
    if not all_rows.embeds:
        return None
    ends = np.cumsum(plan.num_tokens)
    tokens, vectors = [], []
    for place in np.flatnonzero(np.isin(plan.rows, list(all_rows.embeds))).tolist():
        row, count = int(plan.rows[place]), int(plan.num_tokens[place])
        given, first = all_rows.embeds[row], int(all_rows.num_computed[row])
        last = min(first + count, len(given))
        if last == len(given):
            del all_rows.embeds[row]
        if first < last:
            at = int(ends[place]) - count
            tokens.append(np.arange(at, at + last - first))
            dtype: torch.dtype = getattr(torch, given.dtype)
            vectors.append(torch.frombuffer(given.rows(first, last), dtype=dtype).view(-1, given.hidden))
    if not vectors:
        return None
    found = torch.cat(vectors)
    if device.type == "cuda":
        found = found.pin_memory().to(device, non_blocking=True)
    return to_device(np.concatenate(tokens), device), found
