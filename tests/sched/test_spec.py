"""Tests of which rows get draft tokens, and how many."""

from typing import Any

import numpy as np
import pytest
from symbolic import FixedDraftLength

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.stats import StepStats
from quire.data.step_plan import StepResult
from quire.sched.running import Running
from quire.sched.spec import Drafting
from quire.sched.step_tokens import StepTokens


def running_of(**params_: Any) -> Running:
    """Return one row with a prompt of 5 tokens and one output token."""
    running = Running(2, 40)
    params = SamplingParams(max_tokens=30, **params_)
    row = running.admit(Request(id="a", tokens=[1] * 5, params=params, prompt_len=5, limit=35, seed=0), 0)
    running.launch(np.array([row]), np.array([5], np.int32), np.empty(0, np.int32))
    running.fill(np.array([row]), np.array([2], np.int32), np.empty(0, np.int32), np.empty(0, np.int32))
    return running


class InvalidProposer:
    """A proposer that returns ids outside the vocabulary."""

    is_sure = False

    def admit(self, row: int, tokens: Any, salt: str | None = None) -> None: ...

    def propose(self, row: int, most: int) -> Any:
        return np.array([3, 9, 10, -1], np.int32)[:most]


ONE = np.ones(1, np.int32)


def test_ids_outside_the_vocabulary_are_not_drafted() -> None:
    drafts = Drafting(FixedDraftLength(4), InvalidProposer(), max_drafts=4, vocab=10).draft(
        running_of(), ONE, 9
    )
    assert drafts.counts.tolist() == [2] and drafts.token_ids.tolist() == [3, 9]


@pytest.mark.parametrize(
    ("params", "more", "expected"),
    [
        ({}, {}, 4),
        ({}, {"max_len": 9}, 2),
        ({"min_tokens": 4}, {}, 2),
        ({"min_tokens": 1}, {}, 4),
        ({"repetition_penalty": 1.5}, {}, 4),
        ({"bad_words_token_ids": [[1]]}, {}, 4),
        ({"bad_words_token_ids": [[1, 2]]}, {}, 0),
        ({"structured_outputs": {"choice": ["a"]}}, {}, 0),
    ],
)
def test_draft_length_when_the_worker_is_ahead(
    params: dict[str, Any], more: dict[str, Any], expected: int
) -> None:
    """Check that it is decided whether a row may stop, whatever number of drafts is accepted."""
    drafting = Drafting(FixedDraftLength(4), None, max_drafts=4, ahead=True, **more)
    assert drafting.draft(running_of(**params), ONE, 9).counts.sum() == expected


def test_row_is_not_pending_while_min_tokens_is_undecided() -> None:
    """Check two drafts of which the last one may reach `min_tokens`."""
    running, row = running_of(min_tokens=4), np.array([0])
    assert running.pending().tolist() == [1]
    running.launch(row, np.array([3], np.int32), np.array([2], np.int32))
    assert running.pending().tolist() == [0]
    running.fill(row, np.array([3], np.int32), ONE, np.array([2], np.int32))
    assert running.pending().tolist() == [1]


def test_missing_drafts_do_not_count_as_rejected() -> None:
    running, pace, planned = running_of(), FixedDraftLength(4), np.array([3], np.int32)
    drafting, row = Drafting(pace, None, max_drafts=4), np.array([0])
    for drafted, counted in ((2, 2), (0, 0)):
        stats = StepStats()
        running.launch(row, np.array([4], np.int32), planned)
        result = StepResult(np.array([7], np.int32), ONE, drafted=np.array([drafted], np.int32))
        step_tokens = StepTokens(running, row, planned, result, {})
        step_tokens.fill()
        assert drafting.learn(step_tokens, stats) == ({"a": 2} if drafted else {})
        assert stats.num_draft_tokens == counted
    assert pace.num_drafts == 6
