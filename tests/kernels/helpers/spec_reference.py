"""The kernels for successive steps on a device, in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.triton.sampling import LATER
from quire.kernels.triton.spec import CONTEXT, DRAFTED, SpecStep, SpecTokens


def derive_reference(
    state: SpecTokens,
    step: SpecStep,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slots: Sequence[Tensor],
    tables: Tensor,
    block_size: int,
    max_len: int,
) -> None:
    """Compute `derive` in torch."""
    for seq, (row, planned) in enumerate(zip(step.rows.tolist(), step.planned.tolist(), strict=True)):
        if planned < 0:
            continue
        start, end = step.query_starts[seq : seq + 2].tolist()
        length, num_drafts = int(state.lengths[row]), min(planned, int(state.num_drafts[row]))
        seq_lens[seq] = length - 1 + end - start
        for at in range(end - start):
            place, is_used = length - 1 + at, at <= num_drafts
            draft = state.drafts[row, at - 1] if is_used else 0
            token_ids[start + at] = draft if at else state.history[row, length - 1]
            positions[start + at] = min(place, max_len - 1)
            for group, table in zip(slots, tables, strict=True):
                slot = table[row, place // block_size] * block_size + place % block_size if is_used else -1
                group[start + at] = slot


def verify_reference(state: SpecTokens, step: SpecStep, drawn: Tensor, later: Tensor | None = None) -> Tensor:
    """Compute `verify` without rates in torch."""
    if later is not None and later[0] == LATER:
        return torch.empty(len(step.rows) + len(drawn), dtype=torch.int32, device=drawn.device)
    counts = torch.zeros(len(step.rows), dtype=torch.int32, device=drawn.device)
    for seq, (row, first) in enumerate(zip(step.rows.tolist(), step.sample_starts.tolist(), strict=True)):
        if first < 0:
            continue
        length = int(state.lengths[row])
        num_drafts = min(max(int(step.planned[seq]), 0), int(state.num_drafts[row]))
        count = 1
        while count <= num_drafts and state.drafts[row, count - 1] == drawn[first + count - 1]:
            count += 1
        state.history[row, length : length + count] = drawn[first : first + count]
        state.lengths[row] = length + count
        counts[seq] = count | num_drafts << DRAFTED
    return torch.cat((counts, drawn.int()))


def look_up_reference(state: SpecTokens, step: SpecStep, least: int) -> None:
    """Compute `look_up` in torch."""
    for row, first in zip(step.rows.tolist(), step.sample_starts.tolist(), strict=True):
        if first < 0:
            continue
        tokens = state.history[row, : state.lengths[row]].tolist()
        best = 0, 0
        for place in range(1, len(tokens)):
            back = 1
            while back <= min(CONTEXT, place) and tokens[place - back] == tokens[-back] >= 0:
                back += 1
            best = max(best, (back - 1, place)) if back > least else best
        proposed = (tokens[best[1] :] * state.most)[: state.most] if best[0] else []
        proposed = proposed[: next((at for at, token in enumerate(proposed) if token < 0), len(proposed))]
        state.num_drafts[row] = len(proposed)
        state.drafts[row, : len(proposed)] = torch.tensor(proposed, dtype=torch.int64)
