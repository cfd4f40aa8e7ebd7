"""Tests of the penalty, count and logprob kernels against `sampling/`."""

import numpy as np
import pytest
import torch

from quire.data.params import SamplingParams
from quire.kernels.triton.logits import apply_penalties, count_tokens, logprobs
from quire.sampling.logit_adjustments import adjust
from quire.sampling.logprobs import row_logprobs
from quire.sampling.rows import History, SamplingRows

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.mark.parametrize("kind", [torch.int16, torch.int32])
def test_penalties_match_the_sampler(kind: torch.dtype) -> None:
    vocab, max_rows, prompt_len = 4500, 5, 4
    params = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(frequency_penalty=0.5, presence_penalty=-0.7),
        SamplingParams(),
        SamplingParams(repetition_penalty=0.8, frequency_penalty=-0.2, presence_penalty=1.5),
    ]
    state = SamplingRows(max_rows, vocab, DEVICE)
    tokens = np.random.default_rng(0).integers(0, 9, (max_rows, 12)).astype(np.int32)
    tokens[:, -1] = vocab - 1
    rows = np.array([4, 0, 2, 1], np.int32)
    seen = torch.zeros(max_rows, vocab, dtype=torch.uint8, device=DEVICE)
    counts = torch.zeros(max_rows, vocab, dtype=kind, device=DEVICE)
    for row, row_params in zip(rows.tolist(), params, strict=True):
        state.admit(row, row_params, prompt_len=prompt_len, seed=0, stop_ids=())
        seen[row, torch.from_numpy(tokens[row, :prompt_len]).long().to(DEVICE)] = 1
    for step in range(prompt_len, 12):
        ids = torch.from_numpy(tokens[rows, step]).long().to(DEVICE)
        count_tokens(counts, torch.from_numpy(rows).to(DEVICE), ids)
    assert counts.sum() == 8 * len(rows)

    logits = torch.randn(4, vocab, device=DEVICE)
    expected = logits.clone()
    lens = np.full(max_rows, 12, np.int32)
    adjust(expected, rows, state, History(tokens, lens, np.full(max_rows, prompt_len, np.int32)))
    columns = [
        torch.from_numpy(column[rows]).to(DEVICE)
        for column in (state.repetition, state.frequency, state.presence)
    ]
    apply_penalties(logits, torch.from_numpy(rows).to(DEVICE), seen, counts, *columns)
    torch.testing.assert_close(logits, expected)


def test_padding_is_not_modified() -> None:
    counts = torch.zeros(2, 50, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([-1, 1], dtype=torch.int32, device=DEVICE)
    count_tokens(counts, rows, torch.tensor([3, 4], device=DEVICE))
    assert counts.nonzero().tolist() == [[1, 4]]
    logits = torch.ones(2, 50, device=DEVICE)
    penalty = torch.full((2,), 2.0, device=DEVICE)
    apply_penalties(
        logits, rows, torch.ones_like(counts, dtype=torch.uint8), counts, penalty, penalty, penalty
    )
    assert (logits[0] == 1).all()
    assert logits[1, 0] == 0.5 and logits[1, 4] == 0.5 - 2 - 2


@pytest.mark.parametrize("vocab", [5, 9001, *([151936] if CUDA else [])])
def test_logprobs_and_ranks(vocab: int) -> None:
    logits = torch.randint(-40, 40, (5, vocab), device=DEVICE) / 8.0
    logits[1] = -torch.inf
    logits[2, 0] = torch.nan
    logits[3, 1:4] = -torch.inf
    ids = torch.tensor([[0, 1, vocab - 1]], device=DEVICE).expand(5, -1).contiguous()
    values, ranks = logprobs(logits, ids)
    for column in range(3):
        actual = row_logprobs(logits, ids[:, column], np.zeros(5, np.int32), "raw_logprobs")
        expected = torch.tensor([row.logprobs[0] for row in actual], device=DEVICE)
        torch.testing.assert_close(values[:, column], expected, rtol=1e-5, atol=1e-5)
        assert ranks[:, column].tolist() == [row.rank for row in actual]
