"""Prompt embeddings in a step, and the buffer that a CUDA graph reads embeddings from."""

import numpy as np
import torch
from torch import Tensor

from quire.data.step_plan import StepPlan
from quire.sampling.transfer import to_device
from quire.worker.rows import Rows


def take_embeds(plan: StepPlan, all_rows: Rows, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the indices [K] of a step's tokens that have embeddings instead of ids, and the embeddings
    [K, hidden]; None if there are none. The embeddings of completely computed prompts are dropped."""
    if not all_rows.embeds:
        return None
    ends = np.cumsum(plan.num_tokens)
    tokens, vectors = [], []
    for place in np.flatnonzero(np.isin(plan.rows, list(all_rows.embeds))).tolist():
        row, count = int(plan.rows[place]), int(plan.num_tokens[place])
        embeds, first = all_rows.embeds[row], int(all_rows.num_computed[row])
        last = min(first + count, len(embeds))
        if last == len(embeds):
            del all_rows.embeds[row]
        if first < last:
            at = int(ends[place]) - count
            tokens.append(np.arange(at, at + last - first))
            dtype: torch.dtype = getattr(torch, embeds.dtype)
            vectors.append(torch.frombuffer(embeds.rows(first, last), dtype=dtype).view(-1, embeds.hidden))
    if not vectors:
        return None
    values = torch.cat(vectors)
    if device.type == "cuda":
        values = values.pin_memory().to(device, non_blocking=True)
    return to_device(np.concatenate(tokens), device), values


class EmbedsBuffer:
    """The buffer from which a CUDA graph reads the token indices and embeddings of a step, as `Batch.embeds`.
    Unused entries point to the graph's last token, which is padding."""

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
