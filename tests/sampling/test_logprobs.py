"""Tests of logprobs: values, order, ranks and modes."""

import math

import numpy as np
import pytest
import torch

from quire.sampling import logprobs as module
from quire.sampling.logprobs import append_listed, prompt_logprobs, row_logprobs

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, 5.0, 4.0]])


def test_sampled_token_comes_first_then_the_top_tokens() -> None:
    first, second = row_logprobs(LOGITS, torch.tensor([2, 3]), np.array([0, 3], np.int32), "raw_logprobs")
    expected = LOGITS.double().log_softmax(-1)
    assert first.token_ids == [2] and first.logprobs == pytest.approx([expected[0, 2].item()])
    assert second.token_ids == [3, 2, 3, 0]
    assert second.logprobs == pytest.approx(expected[1, [3, 2, 3, 0]].tolist())


def test_rank_counts_all_tokens_at_least_as_likely() -> None:
    """Check that ranks start at 1 and include ties."""
    ranks = [
        row_logprobs(LOGITS[:1], torch.tensor([token]), np.zeros(1, np.int32), "raw_logprobs")[0].rank
        for token in range(4)
    ]
    assert ranks == [4, 2, 3, 2]
    assert row_logprobs(LOGITS[1:], torch.tensor([2]), np.zeros(1, np.int32), "raw_logprobs")[0].rank == 1


def test_logits_modes_report_logits() -> None:
    (actual,) = row_logprobs(LOGITS[1:], torch.tensor([0]), np.array([2], np.int32), "processed_logits")
    assert (actual.token_ids, actual.logprobs) == ([0, 2, 3], [0.0, 5.0, 4.0])


def test_invalid_rows_report_minus_infinity_and_a_rank() -> None:
    """Check that no NaN is returned, which JSON cannot represent."""
    logits = torch.stack([torch.full((4,), -torch.inf), torch.full((4,), torch.nan), LOGITS[1]])
    actual = row_logprobs(logits, torch.tensor([1, 1, 2]), np.full(3, 1, np.int32), "raw_logprobs")
    assert all(not math.isnan(value) for row in actual for value in row.logprobs)
    assert [row.rank for row in actual] == [4, 1, 1]


def test_listed_tokens_follow_in_the_order_of_the_list() -> None:
    actual = row_logprobs(LOGITS, torch.tensor([1, 2]), np.zeros(2, np.int32), "raw_logprobs")
    append_listed(actual, LOGITS, torch.tensor([1, 1]), torch.tensor([3, 0]), "raw_logprobs")
    assert [row.token_ids for row in actual] == [[1], [2, 3, 0]]
    assert actual[1].logprobs == pytest.approx(LOGITS.double().log_softmax(-1)[1, [2, 3, 0]].tolist())


@pytest.mark.parametrize("k", [0, 2, -1])
def test_prompt_logprobs_do_not_depend_on_the_chunks(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    next_ids = torch.arange(7)
    full = prompt_logprobs(torch.clone, logits, next_ids, k, "raw_logprobs")
    monkeypatch.setattr(module, "POSITIONS_AT_ONCE", 3)
    assert prompt_logprobs(torch.clone, logits, next_ids, k, "raw_logprobs") == full
    assert len(full) == 7
    for position, actual in enumerate(full):
        assert len(actual.token_ids) == 1 + (11 if k == -1 else k)
        assert actual.logprobs[0] == pytest.approx(
            logits.log_softmax(-1)[position, position].item(), abs=1e-5
        )
        assert actual.token_ids[0] == position
