"""Tests of each logits adjustment alone: the expected change and no other."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.data.params import SamplingParams
from quire.sampling.logit_adjustments import adjust
from quire.sampling.rows import History, SamplingRows

VOCAB = 12
PROMPT = [1, 2, 2, 3]
OUTPUT = [3, 4, 4, 4]
INF = torch.inf


def adjusted(params: SamplingParams, output: list[int] = OUTPUT) -> tuple[Tensor, Tensor]:
    """Return the row's logits before and after; the other rows of the batch must not change."""
    state = SamplingRows(8, VOCAB, torch.device("cpu"))
    state.admit(2, params, prompt_len=len(PROMPT), seed=0, stop_ids=[10, 11, 99])
    for row in (5, 6):
        state.admit(row, SamplingParams(), prompt_len=1, seed=0, stop_ids=[])
    tokens = np.zeros((8, 16), np.int32)
    tokens[2, : len(PROMPT + output)] = PROMPT + output
    tokens[2, len(PROMPT + output) :] = 7  # left by an earlier request
    num_tokens = np.full(8, 1, np.int32)
    num_tokens[2] = len(PROMPT + output)
    prompt_lens = np.full(8, 1, np.int32)
    prompt_lens[2] = len(PROMPT)
    before = torch.linspace(-2, 3, 3 * VOCAB).reshape(3, VOCAB)
    after = before.clone()
    adjust(after, np.array([6, 2, 5], np.int32), state, History(tokens, num_tokens, prompt_lens))
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    return before[1], after[1]


def test_default_params_change_nothing() -> None:
    before, after = adjusted(SamplingParams())
    assert torch.equal(before, after)


def test_only_allowed_tokens_stay() -> None:
    before, after = adjusted(SamplingParams(allowed_token_ids=[0, 5, 5]))
    expected = torch.full((VOCAB,), -INF)
    expected[[0, 5]] = before[[0, 5]]
    assert torch.equal(after, expected)


def test_bad_words_are_banned_at_their_last_token() -> None:
    before, after = adjusted(SamplingParams(bad_words_token_ids=[[6], [4, 4, 8], [3, 9], []]))
    before[[6, 8]] = -INF
    assert torch.equal(after, before)


@pytest.mark.parametrize(("min_tokens", "held"), [(4, False), (5, True)])
def test_stop_tokens_are_banned_until_min_tokens(min_tokens: int, held: bool) -> None:
    """Check the boundary: with 4 output tokens, min_tokens=4 is met and 5 is not."""
    before, after = adjusted(SamplingParams(min_tokens=min_tokens))
    if held:
        before[[10, 11]] = -INF
    assert torch.equal(after, before)


def test_biases_are_added() -> None:
    before, after = adjusted(SamplingParams(logit_bias={0: 5.0, 11: -2.5}))
    before[0] += 5.0
    before[11] -= 2.5
    assert torch.equal(after, before)


def test_bias_does_not_allow_banned_tokens() -> None:
    _, after = adjusted(SamplingParams(min_tokens=9, logit_bias={10: 100.0}))
    assert after[10] == -INF


def test_repetition_penalty_covers_prompt_and_output_and_follows_the_sign() -> None:
    before, after = adjusted(SamplingParams(repetition_penalty=2.0))
    for token in {*PROMPT, *OUTPUT}:
        before[token] = before[token] / 2 if before[token] > 0 else before[token] * 2
    torch.testing.assert_close(after, before)
    assert (before[[1, 2, 3, 4]] != 0).all()


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_repetition_penalties_keep_logits_finite(penalty: float) -> None:
    """Catches a penalty that overflows to infinity, or becomes 0, as a float of 32 bits."""
    _, after = adjusted(SamplingParams(repetition_penalty=penalty))
    assert after.isfinite().all()


def test_frequency_penalty_counts_the_output_alone() -> None:
    before, after = adjusted(SamplingParams(frequency_penalty=0.5))
    before[3] -= 0.5
    before[4] -= 1.5
    torch.testing.assert_close(after, before)


def test_presence_penalty_applies_once() -> None:
    before, after = adjusted(SamplingParams(presence_penalty=-1.0))
    before[[3, 4]] += 1.0
    torch.testing.assert_close(after, before)


def test_penalties_without_output_change_nothing() -> None:
    before, after = adjusted(SamplingParams(frequency_penalty=1.0, presence_penalty=1.0), output=[])
    assert torch.equal(after, before)


def test_invalid_prompt_ids_are_not_counted() -> None:
    """Check media placeholders in the prompt, which are outside the vocabulary."""
    before, after = adjusted(
        SamplingParams(repetition_penalty=2.0, presence_penalty=1.0), output=[-1, 12, 900]
    )
    for token in set(PROMPT):
        before[token] = before[token] / 2 if before[token] > 0 else before[token] * 2
    torch.testing.assert_close(after, before)
