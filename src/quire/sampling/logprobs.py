"""Logprobs of the tokens of a sequence and of the best beside them."""

from collections.abc import Callable
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.plan import RowLogprobs

POSITIONS_AT_ONCE = 128
"""Positions whose logits are there at once: bounds their memory, however long a prompt is."""


def row_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_best: NDArray[np.int32],
    mode: str,
    ends: NDArray[np.int32] | None = None,
) -> list[RowLogprobs]:
    """For each row of `logits` [R, V]: its own token [R], then its `num_best` [R] best.

    `mode` is a logprobs_mode: `*_logits` reports the values as they are, the others normalise them. The rank
    counts the tokens at least as likely as its own. A NaN is reported as -inf. `ends` are where the tokens of
    each row end, if some have fewer than there are logits.
    """
    token_ids = token_ids[:, None]
    own = logits.gather(1, token_ids)
    ranks = (logits >= own).sum(dim=-1).clamp_(min=1)
    most = int(num_best.max()) if ends is None or (num_best < ends).all() else logits.shape[1]
    best = logits.topk(min(most, logits.shape[1]))
    ids = torch.cat((token_ids, best.indices), dim=1).tolist()
    values = _without_nan(torch.cat((own, best.values), dim=1) - _normaliser(logits, mode)).tolist()
    if ends is not None:  # among those that cannot be said are some that are not there
        for row_ids, row_values, end in zip(ids, values, ends.tolist(), strict=True):
            there = [id < end for id in row_ids]
            row_ids[:], row_values[:] = compress(row_ids, there), compress(row_values, there)
    return [
        RowLogprobs(row_ids[: 1 + count], row_values[: 1 + count], rank)
        for row_ids, row_values, rank, count in zip(
            ids, values, ranks.tolist(), num_best.tolist(), strict=True
        )
    ]


def append_listed(found: list[RowLogprobs], logits: Tensor, at: Tensor, token_ids: Tensor, mode: str) -> None:
    """Add the tokens that a request listed by id: entry i goes to `found[at[i]]`."""
    values = _without_nan(logits[at, token_ids] - _normaliser(logits, mode)[at, 0])
    for place, token_id, value in zip(at.tolist(), token_ids.tolist(), values.tolist(), strict=True):
        found[place].token_ids.append(token_id)
        found[place].logprobs.append(value)


def prompt_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, next_ids: Tensor, k: int, mode: str
) -> list[RowLogprobs]:
    """For each position of a prompt, `hidden` [n, H]: the token after it [n] and the `k` best (-1: all).

    `head` turns hidden states into float32 logits, one slice of positions at a time.
    """
    found = []
    for start in range(0, len(hidden), POSITIONS_AT_ONCE):
        logits = head(hidden[start : start + POSITIONS_AT_ONCE])
        every = len(logits[0]) - int(logits[0].isneginf().sum()) if k == -1 else k
        counts = np.full(len(logits), every, np.int32)
        found += row_logprobs(logits, next_ids[start : start + POSITIONS_AT_ONCE], counts, mode)
    return found


def _normaliser(logits: Tensor, mode: str) -> Tensor:
    """[R, 1] what to take off each logit so that it becomes what `mode` reports."""
    if mode.endswith("logits"):
        return torch.zeros_like(logits[:, :1])
    return logits.logsumexp(dim=-1, keepdim=True)


def _without_nan(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
