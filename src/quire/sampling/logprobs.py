"""Logprobs of sampled and prompt tokens, and of the most likely alternatives."""

from collections.abc import Callable
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.step_plan import RowLogprobs

POSITIONS_AT_ONCE = 128
"""Positions with logits in memory at a time, which bounds the memory of long prompts."""


def row_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_best: NDArray[np.int32],
    mode: str,
    ends: NDArray[np.int32] | None = None,
) -> list[RowLogprobs]:
    """Return for each row of `logits` [R, V] the ids and logprobs of its token (`token_ids` [R]) and of its
    `num_best` [R] most likely tokens, in this order, and the rank of its token.

    `mode` is a logprobs_mode: `*_logits` returns unnormalized values. The rank counts the tokens at least as
    likely as the row's token. A NaN becomes -inf. `ends` is the vocabulary size of each row, if some have
    fewer tokens than there are logits.
    """
    token_ids = token_ids[:, None]
    chosen = logits.gather(1, token_ids)
    ranks = (logits >= chosen).sum(dim=-1).clamp_(min=1)
    most = int(num_best.max()) if ends is None or (num_best < ends).all() else logits.shape[1]
    best = logits.topk(min(most, logits.shape[1]))
    ids = torch.cat((token_ids, best.indices), dim=1).tolist()
    values = _without_nan(torch.cat((chosen, best.values), dim=1) - _normaliser(logits, mode)).tolist()
    if ends is not None:  # drop ids beyond the vocabulary of the row
        for row_ids, row_values, end in zip(ids, values, ends.tolist(), strict=True):
            valid = [id < end for id in row_ids]
            row_ids[:], row_values[:] = compress(row_ids, valid), compress(row_values, valid)
    return [
        RowLogprobs(row_ids[: 1 + count], row_values[: 1 + count], rank)
        for row_ids, row_values, rank, count in zip(
            ids, values, ranks.tolist(), num_best.tolist(), strict=True
        )
    ]


def append_listed(
    entries: list[RowLogprobs], logits: Tensor, at: Tensor, token_ids: Tensor, mode: str
) -> None:
    """Append the tokens that requests list in logprob_token_ids, with their logprobs, to `entries`, which has
    an entry per row of `logits` [R, V]. Token `token_ids[i]` belongs to row `at[i]`."""
    values = _without_nan(logits[at, token_ids] - _normaliser(logits, mode)[at, 0])
    for place, token_id, value in zip(at.tolist(), token_ids.tolist(), values.tolist(), strict=True):
        entries[place].token_ids.append(token_id)
        entries[place].logprobs.append(value)


def prompt_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, next_ids: Tensor, k: int, mode: str
) -> list[RowLogprobs]:
    """Return for each of n prompt positions the logprobs of the next prompt token (`next_ids` [n]) and of the
    `k` most likely tokens (-1: all). `mode` is a logprobs_mode.

    `head` computes float32 logits from hidden states, for a part of the positions in `hidden` [n, H] at a
    time.
    """
    results = []
    for start in range(0, len(hidden), POSITIONS_AT_ONCE):
        logits = head(hidden[start : start + POSITIONS_AT_ONCE])
        every = len(logits[0]) - int(logits[0].isneginf().sum()) if k == -1 else k
        counts = np.full(len(logits), every, np.int32)
        results += row_logprobs(logits, next_ids[start : start + POSITIONS_AT_ONCE], counts, mode)
    return results


def _normaliser(logits: Tensor, mode: str) -> Tensor:
    """Return [R, 1], the value to subtract from each logit for `mode`: the log-sum-exp of the row, or 0 for
    `*_logits`."""
    if mode.endswith("logits"):
        return torch.zeros_like(logits[:, :1])
    return logits.logsumexp(dim=-1, keepdim=True)


def _without_nan(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
