"""Tests of penalties from device counts against those from the host's history."""

import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from quire.data.params import SamplingParams
from quire.sampling.counts import Counts
from quire.sampling.logit_adjustments import adjust
from quire.sampling.rows import History, SamplingRows

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, ROWS, LEN = 50, 24, 40


class BothCounts:
    """A sampler state with a full history on the host and counts on the device."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.state = SamplingRows(ROWS, VOCAB, DEVICE)
        self.tokens = np.zeros((ROWS, LEN), np.int32)
        self.num_tokens, self.prompt_lens = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        self.counts = Counts(ROWS, VOCAB, DEVICE)

    def admit(self, row: int, prompt_len: int, num_tokens: int, **penalties: Any) -> None:
        params = SamplingParams(temperature=0, **penalties)
        self.state.admit(row, params, prompt_len=prompt_len, seed=0, stop_ids=())
        self.tokens[row, :num_tokens] = self.rng.integers(0, VOCAB + 3, num_tokens)
        self.num_tokens[row], self.prompt_lens[row] = num_tokens, prompt_len

    def step(self, rows: list[int]) -> None:
        """Check that both give the same logits; then each row gains a token that only the counts get."""
        where = np.array(rows, np.int32)
        logits = torch.from_numpy(self.rng.normal(size=(len(rows), VOCAB)).astype(np.float32)).to(DEVICE)
        history = History(self.tokens, self.num_tokens, self.prompt_lens)
        expected = logits.clone()
        adjust(expected, where, self.state, history)
        late = self.tokens.copy()
        late[where, self.num_tokens[where] - 1] = 1  # the host does not have the last token yet
        first = self.counts._admission_of[where] != self.state.admission[where]
        late[where[first]] = self.tokens[where[first]]
        adjust(logits, where, self.state, history._replace(tokens=late), self.counts)
        torch.testing.assert_close(logits, expected)
        sampled = self.rng.integers(0, VOCAB, len(rows))
        self.counts.add(where, self.state, torch.from_numpy(sampled).to(DEVICE))
        self.tokens[where, self.num_tokens[where]] = sampled
        self.num_tokens[where] += 1


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.4, "repetition_penalty": 0.8},
    {},
]


def test_token_counts_before_the_host_has_the_token() -> None:
    both = BothCounts()
    for row, penalties in enumerate(PENALTIES):
        both.admit(row, 5 + row, 5 + 2 * row, **penalties)
    for _ in range(6):
        both.step([2, 0, 3, 1])


def test_reused_row_starts_with_zero_counts() -> None:
    both = BothCounts()
    both.admit(1, 4, 4, frequency_penalty=1.0)
    both.step([1])
    both.state.release(1)
    both.admit(1, 3, 6, frequency_penalty=0.5)
    both.step([1])
    both.step([1])


def test_count_rows_are_preallocated() -> None:
    """Check that no memory is allocated on demand after the cache has taken the rest."""
    both = BothCounts()
    where, num_bytes = both.counts.counts.data_ptr(), both.counts.num_bytes
    for row in range(ROWS):
        both.admit(row, 3, 4, presence_penalty=0.5)
    both.step(list(range(ROWS)))
    for row in range(ROWS):
        both.state.release(row)
        both.admit(row, 3, 5, presence_penalty=1.5)
    both.step(list(range(ROWS)))
    assert both.counts.counts.data_ptr() == where and both.counts.num_bytes == num_bytes == 5 * ROWS * VOCAB


def test_cleared_counts_are_rebuilt() -> None:
    both = BothCounts()
    both.admit(1, 4, 4, frequency_penalty=1.0)
    both.step([1])
    both.counts.forget()
    both.step([1])


def test_rejected_drafts_are_subtracted() -> None:
    """Check rows with penalties only, and a token that was sampled twice and rejected once."""
    both = BothCounts()
    for row, fields in ((2, {"frequency_penalty": 1.0}), (3, {}), (5, {"repetition_penalty": 2.0})):
        both.admit(row, prompt_len=1, num_tokens=1, **fields)
    rows, drawn = np.array([2, 2, 2, 3, 5, 5], np.int32), torch.tensor([7, 8, 7, 9, 1, 2])
    wrong = torch.tensor([False, False, True, True, False, True])
    for at in range(len(rows)):
        both.counts.add(rows[at : at + 1], both.state, drawn[at : at + 1].to(DEVICE))
    both.counts.take_back(rows, both.state, drawn.to(DEVICE), wrong.to(DEVICE))
    actual = both.counts.counts.nonzero().tolist()
    assert actual == [[2, 7], [2, 8], [5, 1]] and both.counts.counts.max() == 1
