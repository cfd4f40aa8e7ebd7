"""Vectors in place of tokens: prompts that came as such, and the room that a graph has for them."""

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


class VectorRoom:
    """Where a graph reads the vectors of a step, as `Batch.embeds`. Its last token is padding: what no vector
    lies for goes there."""

    def __init__(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tokens = torch.full((num_tokens,), num_tokens - 1, device=device)
        self.vectors = torch.zeros(num_tokens, width, dtype=dtype, device=device)
        self._count = 0

    def load(self, embeds: tuple[Tensor, Tensor] | None) -> None:
        before, self._count = self._count, 0 if embeds is None else len(embeds[0])
        if self._count < before:
            self.tokens[self._count : before] = len(self.tokens) - 1
        if embeds is not None:
            tokens, vectors = embeds
            self.tokens[: self._count] = tokens
            room, width = self.vectors[: self._count], vectors.shape[1]
            room[:, :width] = vectors
            room[:, width:] = 0
