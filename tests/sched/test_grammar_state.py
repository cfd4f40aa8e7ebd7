"""Tests of reasoning before a grammar, and of the reasoning budget."""

from typing import Any

import pytest

from quire.data.params import ReasoningIds, SamplingParams
from quire.data.request import Request
from quire.data.step_plan import Verdict
from quire.sched.grammar_state import GrammarState, grammar_state_of

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


def make_state(
    *tokens: int, budget: int | None = None, open: bool = False, start: tuple[int, ...] = START
) -> GrammarState:
    params = SamplingParams(thinking_token_budget=budget, reasoning=ReasoningIds(start, END, open))
    return GrammarState(TokenGrammar(*tokens) if tokens else None, params)


def walk(state: GrammarState, *tokens: int) -> list[tuple[Any, int | None, Verdict]]:
    """Return for each token the grammar's next token, the additionally allowed token, and the verdict."""
    states = []
    for token in tokens:
        matcher: Any = state.matcher
        states.append((matcher and matcher.left[:1], state.extra_token, state.advance(token)))
    return states


def test_grammar_starts_after_reasoning() -> None:
    states = walk(make_state(1, 2), *START, 7, 80, 7, 80, 81, 1, 2)
    assert states == [
        ([1], 90, ""),
        (None, 91, ""),
        *[(None, None, "")] * 5,
        ([1], None, ""),
        ([2], None, "complete"),
    ]


def test_open_reasoning_in_prompt_starts_as_reasoning() -> None:
    assert walk(make_state(1, open=True), 5, *END, 1)[-1] == ([1], None, "complete")


@pytest.mark.parametrize("start", [START, ()])
def test_grammar_applies_from_first_token_without_reasoning_start(start: tuple[int, ...]) -> None:
    state = make_state(1, 2, start=start)
    assert [verdict for *_, verdict in walk(state, 1, 2)] == ["", "complete"]


def test_text_that_begins_like_reasoning_start_is_constrained() -> None:
    state = make_state(90, 5, 6)
    assert walk(state, 90, 5, 6) == [([90], 90, ""), ([5], 91, ""), ([6], None, "complete")]


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
    state = make_state(*grammar, budget=budget, open=True)
    assert all(extra is None for _, extra, _ in walk(state, *reasoning))
    assert [(matcher, extra) for matcher, extra, _ in walk(state, *forced)] == [(None, id) for id in forced]
    assert state.is_unconstrained == (not grammar) and state.extra_token is None


def test_budget_without_grammar_leaves_output_unconstrained() -> None:
    state = make_state(budget=1)
    assert state.extra_token is None and not state.is_unconstrained
    walk(state, 5)
    assert state.is_unconstrained


def test_grammar_of_a_resumed_request_continues_after_its_output() -> None:
    """Catches a JSON answer that starts a second time after its engine core has died."""
    request = Request(id="a", tokens=[5, 6, 1, 2], params=SamplingParams(), prompt_len=2, limit=9, seed=0)
    matcher: Any = grammar_state_of(request, TokenGrammar(1, 2, 3)).matcher
    assert matcher.left == [3]


def test_last_words_are_forced_before_the_end_of_reasoning() -> None:
    """Catches a budget that ends the reasoning by its mark alone, and an own end that is overlooked."""
    words, reasoning = (5, 6), ReasoningIds(START, END, True, (5, 6))
    for early in (False, True):
        params = SamplingParams(thinking_token_budget=2, reasoning=reasoning)
        state = GrammarState(None, params)
        for token_id in END if early else (1, 1, *words, *END):
            assert state.extra_token in (None, token_id)
            assert state.advance(token_id) == ""
        assert state.is_unconstrained


def test_a_call_within_the_reasoning_is_constrained() -> None:
    """Catches strict tools that hold after the end mark of the reasoning alone."""
    reasoning = ReasoningIds(START, END, True, breaks=((9,), (7, 8)))
    state = GrammarState(TokenGrammar(7, 8, 3), SamplingParams(reasoning=reasoning))
    for token_id in (1, 9, 7, 7):  # the grammar does not begin with 9
        assert state.advance(token_id) == "" and state.grammar_matcher is None
    assert state.advance(8) == ""
    matcher: Any = state.grammar_matcher
    assert matcher.left == [3]
