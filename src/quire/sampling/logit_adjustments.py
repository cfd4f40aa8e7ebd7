"""Logit adjustments before sampling: allowed ids, bad words, min_tokens, biases, penalties, timestamps."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling.counts import Counts
from quire.sampling.rows import ALLOWED, BANNED, BIASED, HELD, PENALTIES, TIMED, History, Ints, SamplingRows
from quire.sampling.timestamps import apply_timestamp_rules
from quire.sampling.transfer import to_device

REMOVING = ALLOWED | BANNED | HELD | TIMED
"""Flags of `SamplingRows.flags` for features that ban tokens, and so may leave a row without a token."""
_ADJUSTING = REMOVING | BIASED | PENALTIES


def adjust(
    logits: Tensor,
    rows: Ints,
    state: SamplingRows,
    history: History,
    counts: Counts | None = None,
    process: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `logits` [N, V], changed in place by each row's parameters, in vLLM's order.

    Penalties use `counts` if the latest tokens may be only on the device, otherwise `history`.
    `process` applies custom logits processors.
    """
    flags = state.flags[rows]
    present = int(np.bitwise_or.reduce(flags))
    if not present & _ADJUSTING:
        return logits if process is None else process(logits)
    places = state.places(rows)
    if present & ALLOWED:
        at, token_ids, _ = state.allowed.select(places)
        _keep_only(logits, np.flatnonzero(flags & ALLOWED), at, token_ids)
    if present & BANNED:
        _forbid(logits, *state.banned.select(places, history))
    if present & HELD:
        at, token_ids, until = state.held.select(places)
        held = history.num_tokens[rows[at]] < until
        _forbid(logits, at[held], token_ids[held])
    if present & BIASED:
        at, token_ids, bias = state.biased.select(places)
        index = _index(logits, at, token_ids)
        logits.index_put_(index, to_device(bias, state.device).to(logits.dtype), accumulate=True)
    if process is not None:
        logits = process(logits)
    if present & PENALTIES and counts is not None:
        counts.penalise(logits, rows, state, history)
    elif present & PENALTIES:
        _penalise(logits, np.flatnonzero(flags & PENALTIES), rows, state, history)
    if present & TIMED:
        apply_timestamp_rules(logits, rows, state, history)
    return logits


def _index(logits: Tensor, at: Ints, token_ids: Ints) -> tuple[Tensor, Tensor]:
    pair = to_device(np.stack((at, token_ids)).astype(np.int64), logits.device)
    return pair[0], pair[1]


def _forbid(logits: Tensor, at: Ints, token_ids: Ints) -> None:
    if len(at):
        logits[_index(logits, at, token_ids)] = -torch.inf


def _keep_only(logits: Tensor, masked: NDArray[np.intp], at: Ints, token_ids: Ints) -> None:
    index = _index(logits, at, token_ids)
    kept = logits[index]
    logits.index_fill_(0, to_device(masked, logits.device), -torch.inf)
    logits[index] = kept


def _penalise(
    logits: Tensor, at: NDArray[np.intp], rows: Ints, state: SamplingRows, history: History
) -> None:
    """Apply to the rows `at` of `logits` [N, V], in place, the repetition penalty over prompt and output, and
    the frequency and presence penalties over the output."""
    device, vocab = state.device, logits.shape[1]
    index = to_device(at, device)
    chosen = rows[at]
    lens = history.num_tokens[chosen][:, None]
    positions = np.arange(lens.max())
    known = history.tokens[chosen, : len(positions)].astype(np.int64)
    # Column `vocab` of the counts below collects what must not count: padding and invalid ids.
    known[(positions >= lens) | (known < 0) | (known >= vocab)] = vocab
    penalised = logits.index_select(0, index)

    repetition = state.repetition[chosen][:, None]
    if (repetition != 1.0).any():
        seen = torch.zeros(len(at), vocab + 1, dtype=torch.bool, device=device)
        seen.scatter_(1, to_device(known, device), True)
        factor = to_device(repetition, device)
        scaled = torch.where(penalised > 0, penalised / factor, penalised * factor)
        penalised = torch.where(seen[:, :vocab], scaled, penalised)

    frequency, presence = state.frequency[chosen][:, None], state.presence[chosen][:, None]
    if frequency.any() or presence.any():
        known[positions < history.prompt_lens[chosen][:, None]] = vocab
        output = to_device(known, device)
        counts = torch.zeros(len(at), vocab + 1, device=device)
        counts.scatter_add_(1, output, torch.ones_like(output, dtype=counts.dtype))
        counts = counts[:, :vocab]
        penalised -= to_device(frequency, device) * counts
        penalised -= to_device(presence, device) * (counts > 0)
    logits.index_copy_(0, index, penalised)
