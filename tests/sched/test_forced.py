"""Tests of tokens that grammars force as draft tokens: how many, and which beside tokens in flight."""

from typing import Any

import numpy as np
import pytest
from symbolic import FixedDraftLength

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.stats import StepStats
from quire.data.step_plan import StepResult
from quire.sched.forced import ForcedDrafts
from quire.sched.running import Running
from quire.sched.spec import NO_DRAFTS, Drafting, Drafts
from quire.sched.step_tokens import StepTokens

NONE = np.empty(0, np.int32)


class ForcedRuns:
    """Constraints whose grammars force a number of tokens for each row."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def forced_tokens(self, running: Running, row: int) -> list[int]:
        return [100 * row + number for number in range(self.lengths[row])]


def running_of(num_rows: int, *, limit: int = 40, known: bool = True, constrained: bool = True) -> Running:
    """Return rows with a prompt of 5 tokens and one output token, which is known or in flight."""
    running = Running(num_rows, 60)
    params = SamplingParams(structured_outputs={"regex": "a"} if constrained else None)
    for number in range(num_rows):
        request = Request(id=str(number), tokens=[1] * 5, params=params, prompt_len=5, limit=limit, seed=0)
        running.admit(request, 0)
    rows = running.order
    running.launch(rows, np.full(num_rows, 5, np.int32), NONE)
    if known:
        running.fill(rows, np.full(num_rows, 2, np.int32), NONE, NONE)
    return running


def draft(running: Running, *lengths: int, budget: int = 99, most: int = 64) -> Drafts:
    ones = np.ones(len(running.order), np.int32)
    return ForcedDrafts(ForcedRuns(*lengths), most).draft(running, ones, budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "options", "counts"),
    [
        ((4, 0), {}, [4, 0]),
        ((1, 2), {}, [1, 1]),
        ((5, 6), {}, [5, 3]),
        ((9, 9), {"budget": 4}, [4, 0]),
        ((9, 9), {"most": 8}, [8, 0]),
        ((0, 0), {}, []),
        ((3, 3), {"budget": 0}, []),
    ],
)
def test_number_of_forced_tokens_is_a_power_of_two(
    lengths: tuple[int, ...], options: dict[str, Any], counts: list[int]
) -> None:
    running = running_of(2)
    drafts = draft(running, *lengths, **options)
    assert drafts.counts.tolist() == counts
    owners = [(row, number) for row, count in enumerate(counts) for number in range(count)]
    assert drafts.token_ids.tolist() == [100 * row + number for row, number in owners]
    assert running.has_forced[:2].tolist() == [count > 0 for count in counts or (0, 0)]


def test_step_with_forced_tokens_is_not_larger_than_a_tape() -> None:
    assert draft(running_of(16), *[9] * 16).counts.sum() == 16
    assert draft(running_of(17), *[9] * 17) is NO_DRAFTS
    assert draft(running_of(64), *[9] * 64) is NO_DRAFTS
    assert draft(running_of(70), *[9] * 70).counts.sum() == 64


def test_token_in_flight_is_the_first_forced_one() -> None:
    """Catches drafts that repeat a token in flight, or that follow one that is not forced."""
    assert draft(running_of(1, known=False), 3).token_ids.tolist() == [1, 2]
    assert draft(running_of(1, known=False), 1) is NO_DRAFTS
    assert draft(running_of(1, known=False), 0) is NO_DRAFTS


def test_forced_tokens_end_before_the_limit() -> None:
    assert draft(running_of(1, limit=9), 16).counts.tolist() == [2]
    assert draft(running_of(1, limit=7), 16) is NO_DRAFTS
    assert draft(running_of(1, limit=9, known=False), 16).counts.tolist() == [2]


def test_rows_without_a_grammar_have_no_forced_tokens() -> None:
    assert draft(running_of(1, constrained=False), 3) is NO_DRAFTS


def test_drafts_of_two_kinds_are_merged_by_row() -> None:
    forced = Drafts(np.array([0, 2, 0, 1], np.int32), np.array([1, 2, 3], np.int32))
    others = Drafts(np.array([2, 0, 0, 0], np.int32), np.array([8, 9], np.int32))
    merged = forced.merged(others)
    assert merged.counts.tolist() == [2, 2, 0, 1] and merged.token_ids.tolist() == [8, 9, 1, 2, 3]
    assert forced.merged(NO_DRAFTS) is forced and NO_DRAFTS.merged(others) is others


def test_forced_tokens_are_not_counted_as_drafts() -> None:
    """Catches acceptance rates and draft lengths that count tokens which a grammar forces."""
    running, pace = running_of(2), FixedDraftLength(4)
    drafting, counts = Drafting(pace, None, max_drafts=4), np.array([2, 2], np.int32)
    running.has_forced[0] = True
    running.launch(running.order, 1 + counts, counts)
    result = StepResult(np.arange(6, dtype=np.int32), np.array([3, 3], np.int32))
    step_tokens, stats = StepTokens(running, running.order, counts, result, {}), StepStats()
    step_tokens.fill()
    assert drafting.learn(step_tokens, stats) == {"1": 2}
    assert (stats.num_drafts, stats.num_draft_tokens, pace.num_drafts) == (1, 2, 2)
