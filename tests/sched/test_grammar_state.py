"""Reasoning before a grammar, and its limit."""

from typing import Any

import pytest

from quire.data.params import ReasoningIds, SamplingParams
from quire.data.plan import Verdict
from quire.sched.grammar_state import GrammarState

START, END = (90, 91), (80, 81)


class Letters:
    """A grammar of exactly these tokens."""

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)

    def advance(self, token_id: int) -> Verdict:
        if not self.left or self.left[0] != token_id:
            return "error"
        self.left.pop(0)
        return "" if self.left else "complete"

    def copy(self) -> "Letters":
        return Letters(*self.left)


def follower(
    *tokens: int, budget: int | None = None, open: bool = False, start: tuple[int, ...] = START
) -> GrammarState:
    params = SamplingParams(thinking_token_budget=budget, reasoning=ReasoningIds(start, END, open))
    return GrammarState(Letters(*tokens) if tokens else None, params)


def walk(one: GrammarState, *tokens: int) -> list[tuple[Any, int | None, Verdict]]:
    """Before each token: what the grammar would take, what else may come; and what came of it."""
    found = []
    for token in tokens:
        matcher: Any = one.matcher
        found.append((matcher and matcher.left[:1], one.also, one.advance(token)))
    return found


def test_the_grammar_starts_behind_the_reasoning() -> None:
    said = walk(follower(1, 2), *START, 7, 80, 7, 80, 81, 1, 2)
    assert said == [
        ([1], 90, ""),
        (None, 91, ""),
        *[(None, None, "")] * 5,
        ([1], None, ""),
        ([2], None, "complete"),
    ]


def test_an_open_prompt_is_reasoning_at_once() -> None:
    assert walk(follower(1, open=True), 5, *END, 1)[-1] == ([1], None, "complete")


@pytest.mark.parametrize("start", [START, ()])
def test_without_a_start_the_grammar_counts_from_the_first_token(start: tuple[int, ...]) -> None:
    one = follower(1, 2, start=start)
    assert [verdict for *_, verdict in walk(one, 1, 2)] == ["", "complete"]


def test_a_text_that_begins_as_reasoning_does_is_still_a_text() -> None:
    one = follower(90, 5, 6)
    assert walk(one, 90, 5, 6) == [([90], 90, ""), ([5], 91, ""), ([6], None, "complete")]


@pytest.mark.parametrize(
    ("budget", "said", "forced"),
    [
        (0, [], [80, 81]),
        (2, [7, 7], [80, 81]),
        (2, [7, 80], [81]),
        (3, [7, 80, 80], [81]),
    ],
)
@pytest.mark.parametrize("grammar", [(), (1,)])
def test_beyond_the_budget_the_end_is_forced(
    budget: int, said: list[int], forced: list[int], grammar: tuple[int, ...]
) -> None:
    one = follower(*grammar, budget=budget, open=True)
    assert all(also is None for _, also, _ in walk(one, *said))
    assert [(matcher, also) for matcher, also, _ in walk(one, *forced)] == [(None, id) for id in forced]
    assert one.is_free == (not grammar) and one.also is None


def test_a_budget_alone_leaves_an_answer_without_reasoning_free() -> None:
    one = follower(budget=1)
    assert one.also is None and not one.is_free
    walk(one, 5)
    assert one.is_free
