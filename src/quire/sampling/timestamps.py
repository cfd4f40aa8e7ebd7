"""Rows that tell the time, as Whisper does: which moments, and whether one, may come next.

What is said stands between two moments, none is before the one in front of it, and an answer begins with one.
Where all moments together are likelier than the likeliest word, one of them comes.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.sampling.rows import TIMED, Ints, SamplingRows
from quire.sampling.transfer import to_device


class TimestampBounds(NamedTuple):
    """What may come next, of each of some rows."""

    zero: Ints
    """The first token of time."""
    text: Ints
    """Tokens below that are no moments, and may not come."""
    first: Ints
    """The first moment that may."""
    end: Ints
    """Where those end that may."""


def bounds_of(
    rows: Ints, state: SamplingRows, tokens: Ints, num_tokens: Ints, prompt_lens: Ints, vocab: int
) -> TimestampBounds:
    zero, end_id, max_first = (column[rows] for column in state.moments)
    lens = num_tokens[rows]
    num_said = lens - prompt_lens[rows]
    last, before = (tokens[rows, np.maximum(lens - back, 0)] for back in (1, 2))
    is_told = (num_said >= 1) & (last >= zero)
    opens = is_told & ((num_said < 2) | (before >= zero))
    closes = is_told & ~opens
    positions = np.arange(int(lens.max(initial=0)))
    is_said = (positions >= prompt_lens[rows][:, None]) & (positions < lens[:, None])
    latest = np.where(is_said, tokens[rows, : len(positions)], 0).max(axis=1, initial=0)  # none goes back
    first = np.where(latest >= zero, latest + ~closes, zero)
    begins = num_said == 0
    return TimestampBounds(
        zero=zero,
        text=np.where(begins, zero, np.where(closes, end_id, 0)).astype(np.int32),
        first=np.where(opens, vocab, first).astype(np.int32),
        end=np.where(begins & (max_first >= 0), zero + max_first + 1, vocab).astype(np.int32),
    )


def tell_time(
    logits: Tensor, rows: Ints, state: SamplingRows, tokens: Ints, num_tokens: Ints, prompt_lens: Ints
) -> None:
    """Take out of `logits` [N, V], in place, what those of `rows` that tell the time may not say next."""
    at = np.flatnonzero(state.flags[rows] & TIMED)
    vocab = logits.shape[1]
    bounds = bounds_of(rows[at], state, tokens, num_tokens, prompt_lens, vocab)
    zero, text, first, end = to_device(np.stack(bounds)[:, :, None], logits.device)
    ids = torch.arange(vocab, device=logits.device)
    index = to_device(at, logits.device)
    is_time = ids >= zero
    gone = torch.where(is_time, (ids < first) | (ids >= end), (ids < text) | (ids == zero - 1))
    left = logits.index_select(0, index).masked_fill_(gone, -torch.inf)
    all_moments = left.masked_fill(~is_time, -torch.inf).logsumexp(1, keepdim=True)
    best_text = left.masked_fill(is_time, -torch.inf).amax(1, keepdim=True)
    left.masked_fill_(~is_time & (all_moments > best_text), -torch.inf)
    logits.index_copy_(0, index, left)
