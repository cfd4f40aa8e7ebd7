"""Tests of reasoning before a grammar, and of the reasoning budget."""

from typing import Any

import pytest

from quire.data.params import ReasoningIds, SamplingParams
from quire.data.request import Request
from quire.data.step_plan import Verdict
from quire.sched.grammar_state import GrammarState, follower_of

START, END = (90, 91), (80, 81)


class TokenGrammar:
    """A grammar that accepts exactly these tokens."""

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)

    def advance(self, token_id: int) -> Verdict:
        if not self.left or self.left[0] != token_id:
            return "error"
        self.left.pop(0)
        return "" if self.left else "complete"

    def copy(self) -> "TokenGrammar":
        return TokenGrammar(*self.left)


def follower(
    *tokens: int, budget: int | None = None, open: bool = False, start: tuple[int, ...] = START
) -> GrammarState:
    params = SamplingParams(thinking_token_budget=budget, reasoning=ReasoningIds(start, END, open))
    return GrammarState(TokenGrammar(*tokens) if tokens else None, params)


def walk(one: GrammarState, *tokens: int) -> list[tuple[Any, int | None, Verdict]]:
    """Return for each token the grammar's next token, the additionally allowed token, and the verdict."""
    states = []
    for token in tokens:
        matcher: Any = one.matcher
        states.append((matcher and matcher.left[:1], one.also, one.advance(token)))
    return states


def test_grammar_starts_after_reasoning() -> None:
    states = walk(follower(1, 2), *START, 7, 80, 7, 80, 81, 1, 2)
    assert states == [
        ([1], 90, ""),
        (None, 91, ""),
        *[(None, None, "")] * 5,
        ([1], None, ""),
        ([2], None, "complete"),
    ]


def test_open_reasoning_in_prompt_starts_as_reasoning() -> None:
    assert walk(follower(1, open=True), 5, *END, 1)[-1] == ([1], None, "complete")


@pytest.mark.parametrize("start", [START, ()])
def test_grammar_applies_from_first_token_without_reasoning_start(start: tuple[int, ...]) -> None:
    one = follower(1, 2, start=start)
    assert [verdict for *_, verdict in walk(one, 1, 2)] == ["", "complete"]


def test_text_that_begins_like_reasoning_start_is_constrained() -> None:
    one = follower(90, 5, 6)
    assert walk(one, 90, 5, 6) == [([90], 90, ""), ([5], 91, ""), ([6], None, "complete")]


@pytest.mark.parametrize(
    ("budget", "reasoning", "forced"),
    [
        (0, [], [80, 81]),
        (2, [7, 7], [80, 81]),
        (2, [7, 80], [81]),
        (3, [7, 80, 80], [81]),
    ],
)
@pytest.mark.parametrize("grammar", [(), (1,)])
def test_end_of_reasoning_is_forced_at_the_budget(
    budget: int, reasoning: list[int], forced: list[int], grammar: tuple[int, ...]
) -> None:
    one = follower(*grammar, budget=budget, open=True)
    assert all(also is None for _, also, _ in walk(one, *reasoning))
    assert [(matcher, also) for matcher, also, _ in walk(one, *forced)] == [(None, id) for id in forced]
    assert one.is_free == (not grammar) and one.also is None


def test_budget_without_grammar_leaves_output_unconstrained() -> None:
    one = follower(budget=1)
    assert one.also is None and not one.is_free
    walk(one, 5)
    assert one.is_free


def test_grammar_of_a_resumed_request_continues_after_its_output() -> None:
    """Catches a JSON answer that starts a second time after its engine core has died."""
    request = Request(id="a", tokens=[5, 6, 1, 2], params=SamplingParams(), prompt_len=2, limit=9, seed=0)
    matcher: Any = follower_of(request, TokenGrammar(1, 2, 3)).matcher
    assert matcher.left == [3]
