"""Timestamp rules of Whisper: which timestamps, or whether any, may come next.

Text stands between two timestamps, timestamps never decrease, and a transcript begins with one. If all
timestamps together are more likely than the most likely text token, a timestamp is sampled.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.sampling.rows import TIMED, History, Ints, SamplingRows
from quire.sampling.transfer import to_device


class TimestampBounds(NamedTuple):
    """Token ids that may come next in each row: text tokens from `text` on, and timestamp tokens from `first`
    to `end` - 1."""

    zero: Ints
    """Id of the first timestamp token in the vocabulary."""
    text: Ints
    """Text tokens below this id are not allowed."""
    first: Ints
    """Id of the first allowed timestamp token; the vocabulary size if none is allowed."""
    end: Ints
    """Id after that of the last allowed timestamp token."""


def bounds_of(rows: Ints, state: SamplingRows, history: History, vocab: int) -> TimestampBounds:
    tokens, num_tokens, prompt_lens = history
    zero, end_id, max_first = (column[rows] for column in state.timestamp_tokens)
    lens = num_tokens[rows]
    num_output = lens - prompt_lens[rows]
    last, before = (tokens[rows, np.maximum(lens - back, 0)] for back in (1, 2))
    after_timestamp = (num_output >= 1) & (last >= zero)
    opens = after_timestamp & ((num_output < 2) | (before >= zero))
    closes = after_timestamp & ~opens
    positions = np.arange(int(lens.max(initial=0)))
    is_output = (positions >= prompt_lens[rows][:, None]) & (positions < lens[:, None])
    latest = np.where(is_output, tokens[rows, : len(positions)], 0).max(axis=1, initial=0)
    first = np.where(latest >= zero, latest + ~closes, zero)
    begins = num_output == 0
    return TimestampBounds(
        zero=zero,
        text=np.where(begins, zero, np.where(closes, end_id, 0)).astype(np.int32),
        first=np.where(opens, vocab, first).astype(np.int32),
        end=np.where(begins & (max_first >= 0), zero + max_first + 1, vocab).astype(np.int32),
    )


def apply_timestamp_rules(logits: Tensor, rows: Ints, state: SamplingRows, history: History) -> None:
    """Mask the tokens of `logits` [N, V] that the rows with timestamps must not sample next, in place."""
    at = np.flatnonzero(state.flags[rows] & TIMED)
    vocab = logits.shape[1]
    bounds = bounds_of(rows[at], state, history, vocab)
    zero, text, first, end = to_device(np.stack(bounds)[:, :, None], logits.device)
    ids = torch.arange(vocab, device=logits.device)
    index = to_device(at, logits.device)
    is_time = ids >= zero
    masked = torch.where(is_time, (ids < first) | (ids >= end), (ids < text) | (ids == zero - 1))
    left = logits.index_select(0, index).masked_fill_(masked, -torch.inf)
    timestamps = left.masked_fill(~is_time, -torch.inf).logsumexp(1, keepdim=True)
    best_text = left.masked_fill(is_time, -torch.inf).amax(1, keepdim=True)
    left.masked_fill_(~is_time & (timestamps > best_text), -torch.inf)
    logits.index_copy_(0, index, left)
