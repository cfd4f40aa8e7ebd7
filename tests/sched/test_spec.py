"""Which rows may have drafts, and how many."""

from typing import Any

import numpy as np
import pytest
from symbolic import Always

from quire.data.params import SamplingParams
from quire.data.plan import StepResult
from quire.data.request import Request
from quire.data.stats import StepStats
from quire.sched.running import Running
from quire.sched.spec import Drafting
from quire.sched.step_tokens import StepTokens


def running_of(**asked: Any) -> Running:
    """One row, of a prompt of 5 tokens and one of its own."""
    running = Running(2, 40)
    params = SamplingParams(max_tokens=30, **asked)
    row = running.admit(Request(id="a", tokens=[1] * 5, params=params, prompt_len=5, limit=35, seed=0), 0)
    running.launch(np.array([row]), np.array([5], np.int32), np.empty(0, np.int32))
    running.fill(np.array([row]), np.array([2], np.int32), np.empty(0, np.int32), np.empty(0, np.int32))
    return running


class Odd:
    """Proposes what is no token."""

    is_sure = False

    def admit(self, row: int, tokens: Any, salt: str | None = None) -> None: ...

    def propose(self, row: int, most: int) -> Any:
        return np.array([3, 9, 10, -1], np.int32)[:most]


ONE = np.ones(1, np.int32)


def test_what_is_no_token_is_no_draft() -> None:
    found = Drafting(Always(4), Odd(), most=4, vocab=10).draft(running_of(), ONE, 9)
    assert found.counts.tolist() == [2] and found.token_ids.tolist() == [3, 9]


@pytest.mark.parametrize(
    ("asked", "more", "expected"),
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
def test_rows_of_a_worker_that_is_ahead(asked: dict[str, Any], more: dict[str, Any], expected: int) -> None:
    """Whatever becomes of its drafts, a row is sure whether it may stop."""
    drafting = Drafting(Always(4), None, most=4, ahead=True, **more)
    assert drafting.draft(running_of(**asked), ONE, 9).counts.sum() == expected


def test_a_row_waits_where_it_is_not_known_whether_it_may_stop() -> None:
    """The last of two drafts may be the last token that is held back."""
    running, row = running_of(min_tokens=4), np.array([0])
    assert running.pending().tolist() == [1]
    running.launch(row, np.array([3], np.int32), np.array([2], np.int32))
    assert running.pending().tolist() == [0]
    running.fill(row, np.array([3], np.int32), ONE, np.array([2], np.int32))
    assert running.pending().tolist() == [1]


def test_drafts_that_were_not_found_were_not_wrong() -> None:
    running, pace, planned = running_of(), Always(4), np.array([3], np.int32)
    drafting, row = Drafting(pace, None, most=4), np.array([0])
    for drafted, counted in ((2, 2), (0, 0)):
        stats = StepStats()
        running.launch(row, np.array([4], np.int32), planned)
        result = StepResult(np.array([7], np.int32), ONE, drafted=np.array([drafted], np.int32))
        landed = StepTokens(running, row, planned, result, {})
        landed.fill()
        assert drafting.learn(landed, stats) == ({"a": 2} if drafted else {})
        assert stats.num_draft_tokens == counted
    assert pace.num_drafts == 6
