"""Tests of timestamp tokens against the processor of transformers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.data.params import SamplingParams
from quire.data.timestamps import TimestampTokens
from quire.sampling.logit_adjustments import adjust
from quire.sampling.rows import History, SamplingRows

VOCAB, END, ZERO = 60, 30, 40
"""Ids of words, the end token, task tokens and timestamps."""
A, B = 3, 7
PROMPT = [31, 32]
OUTPUTS = [
    [],
    [ZERO],
    [ZERO + 4],
    [ZERO, A],
    [ZERO + 2, A, B, A],
    [ZERO, A, ZERO + 5],
    [ZERO, A, ZERO + 5, ZERO + 5],
    [ZERO, A, ZERO + 5, ZERO + 9],
    [ZERO, A, ZERO + 5, ZERO + 9, B],
    [ZERO, A, VOCAB - 1],
    [ZERO, A, VOCAB - 1, VOCAB - 1],
    [ZERO, A, VOCAB - 1, VOCAB - 1, B],
]


def expected(output: list[int], scores: torch.Tensor, max_first: int | None) -> torch.Tensor:
    from transformers import WhisperTimeStampLogitsProcessor

    facts = {"eos_token_id": END, "bos_token_id": END, "no_timestamps_token_id": ZERO - 1}
    config = SimpleNamespace(**facts, max_initial_timestamp_index=max_first)
    rules = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    actual: torch.Tensor = rules(torch.tensor([[*PROMPT, *output]]), scores[None])[0]
    return actual


@pytest.mark.parametrize("max_first", [None, 0, 6])
def test_allowed_tokens_match_transformers(max_first: int | None) -> None:
    """Check one batch with any history, and likely and unlikely timestamps.

    Rows without timestamps are unchanged, and timestamps in a prompt do not count.
    """
    rows = np.arange(2 * len(OUTPUTS), dtype=np.int32)
    state = SamplingRows(len(rows), VOCAB, torch.device("cpu"))
    tokens = np.zeros((len(rows), 16), np.int32)
    lens = np.zeros(len(rows), np.int32)
    for row in rows.tolist():
        known = [*PROMPT, *OUTPUTS[row // 2]]
        tokens[row, : len(known)], lens[row] = known, len(known)
        message = TimestampTokens(ZERO, END, max_first) if row % 2 else None
        state.admit(
            row, SamplingParams(timestamp_tokens=message), prompt_len=len(PROMPT), seed=0, stop_ids=()
        )
    prompt_lens = np.full(len(rows), len(PROMPT), np.int32)
    forced = set[bool]()
    for seed, lift in enumerate((-30.0, -3.0, -1.5, 0.0, 9.0)):
        torch.manual_seed(seed)
        logits = torch.randn(len(rows), VOCAB)
        logits[:, ZERO:] += lift
        before = logits.clone()
        adjust(logits, rows, state, History(tokens, lens, prompt_lens))
        for row in rows.tolist():
            want = before[row] if row % 2 == 0 else expected(OUTPUTS[row // 2], before[row], max_first)
            assert torch.equal(logits[row], want), (OUTPUTS[row // 2], lift)
            if OUTPUTS[row // 2][-1:] == [A] and row % 2:
                forced.add(bool((logits[row, :ZERO] == -torch.inf).all()))
    assert forced == {False, True}
    state.release(1)
    second = before.clone()
    adjust(second, rows[1:2], state, History(tokens, lens, prompt_lens))
    assert torch.equal(second, before)
