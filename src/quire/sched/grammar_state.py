"""GrammarState: the state of a request constrained by a grammar or a reasoning budget."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple, Protocol, Self

from quire.data.params import ReasoningIds, SamplingParams
from quire.data.request import Request
from quire.data.step_plan import Verdict


class GrammarMatcher(Protocol):
    """The state of one sequence in its grammar; `advance` moves it by a generated token."""

    def advance(self, token_id: int) -> Verdict: ...

    def copy(self) -> Self:
        """Return a matcher in the same state."""


class AllowedTokens(NamedTuple):
    """The tokens that a sampled position allows."""

    matcher: GrammarMatcher | None
    """Matcher that allows tokens; None if only `extra_token` is allowed."""
    extra_token: int | None
    """Token allowed in addition to the matcher's."""


class GrammarState:
    """Tracks which tokens a request may generate next.

    The output may begin with reasoning, which the grammar does not constrain. Start tokens or the prompt open
    it, and end tokens close it. Output that does not open with the start tokens has no reasoning."""

    def __init__(self, matcher: GrammarMatcher | None, params: SamplingParams) -> None:
        """Build the state; without a matcher, only the length of the reasoning is limited."""
        self._matcher = matcher
        self._budget = params.thinking_token_budget
        self._reasoning: ReasoningIds | None = params.reasoning
        """Token ids that open and close the reasoning; None once there is no more reasoning."""
        self._is_open = self._reasoning is not None and self._reasoning.open
        self._generated: list[int] = []
        """Tokens since the start of the output, or since the reasoning was opened."""
        self._text_matcher: GrammarMatcher | None = None
        """Matcher for the case that the generated tokens, which could open the reasoning, are text of the
        grammar instead. None: the grammar does not allow them as text."""
        if self._reasoning is not None and not self._is_open:
            if not self._reasoning.start:
                self._reasoning = None
            elif matcher is not None:
                self._text_matcher = matcher.copy()

    def skip_reasoning(self) -> None:
        """Set that the whole output is text of the grammar."""
        self._reasoning = None

    @property
    def is_unconstrained(self) -> bool:
        """Whether nothing constrains the request any more."""
        return self._reasoning is None and self._matcher is None

    @property
    def grammar_matcher(self) -> GrammarMatcher | None:
        """Return the matcher once the reasoning is over; None during it, or without a grammar."""
        return self._matcher if self._reasoning is None else None

    @property
    def matcher(self) -> GrammarMatcher | None:
        """Return the matcher that allows the next tokens; None if no grammar applies."""
        return self._matcher if self._reasoning is None else self._text_matcher

    @property
    def extra_token(self) -> int | None:
        """Return a token allowed in addition to the matcher's, or alone without a matcher: the next one that
        opens the reasoning, or that closes it when its token budget is spent. None: no such token."""
        if self._reasoning is None:
            return None
        if not self._is_open:
            return None if self._matcher is None else self._reasoning.start[len(self._generated)]
        if self._budget is None or len(self._generated) < self._budget:
            return None
        forced = (*self._reasoning.last_words, *self._reasoning.end)
        return forced[_overlap(self._generated, forced)]

    def allowed_after(
        self, drafts: Sequence[int], forced: Sequence[int] = ()
    ) -> Iterator[tuple[int, AllowedTokens]]:
        """Yield the number of draft tokens before a position, and the tokens that it allows, for the next
        token and after each draft token, up to one that ends the constraint. Positions that allow all tokens
        are left out. `forced` are the next tokens that the grammar forces."""
        state, num_drafts = self, 0
        for token_id, forced_id in zip(drafts, forced, strict=False):
            if token_id != forced_id:
                break
            yield num_drafts, AllowedTokens(None, token_id)
            state = self.copy() if state is self else state
            num_drafts += 1
            if state.advance(token_id):
                return
        while True:
            if state.matcher is not None or state.extra_token is not None:
                yield num_drafts, AllowedTokens(state.matcher, state.extra_token)
            if num_drafts == len(drafts):
                return
            state = state.copy()
            if state.advance(drafts[num_drafts]) or state.is_unconstrained:
                return
            num_drafts += 1

    def copy(self) -> Self:
        """Return a copy of this state; each of the two advances independently of the other."""
        clone = copy(self)
        clone._generated = list(self._generated)
        clone._matcher, clone._text_matcher = (
            None if matcher is None else matcher.copy() for matcher in (self._matcher, self._text_matcher)
        )
        return clone

    def advance(self, token_id: int) -> Verdict:
        """Advance by a generated token. Return the grammar's verdict: empty if the output may continue, else
        how it ends with this token."""
        if self._reasoning is None:
            return "" if self._matcher is None else self._matcher.advance(token_id)
        self._generated.append(token_id)
        if not self._is_open:
            return self._open(self._reasoning.start, token_id)
        end = list(self._reasoning.end)
        if self._generated[-len(end) :] == end:
            self._reasoning = None
        elif self._matcher is not None:
            self._break_off(self._matcher, self._reasoning.breaks)
        return ""

    def _break_off(self, matcher: GrammarMatcher, breaks: tuple[tuple[int, ...], ...]) -> None:
        """End the reasoning if the generated tokens end with one of the `breaks`, such as the mark of a tool
        call, and the grammar may begin with it."""
        for mark in breaks:
            if tuple(self._generated[-len(mark) :]) == mark:
                begun = matcher.copy()
                if not any(begun.advance(token_id) for token_id in mark):
                    self._matcher, self._reasoning = begun, None
                    return

    def _open(self, start: tuple[int, ...], token_id: int) -> Verdict:
        if tuple(self._generated) == start:
            self._is_open, self._generated, self._text_matcher = True, [], None
            return ""
        verdict = "" if self._text_matcher is None else self._text_matcher.advance(token_id)
        if tuple(self._generated) != start[: len(self._generated)]:
            if self._matcher is not None and self._text_matcher is None:
                return "error"
            self._reasoning, self._matcher = None, self._text_matcher
        elif verdict in ("error", "limit"):
            self._text_matcher, verdict = None, ""
        return verdict


def grammar_state_of(
    request: Request, matcher: GrammarMatcher | None, *, constrains_reasoning: bool = False
) -> GrammarState:
    """Return the grammar state of a new request, advanced by its output so far. The output is not empty if
    another engine core began the request. With `constrains_reasoning`, a grammar begins at once."""
    state = GrammarState(matcher, request.params)
    if constrains_reasoning and matcher is not None:
        state.skip_reasoning()
    for token_id in request.tokens[request.prompt_len :]:
        state.advance(token_id)
    return state


def _overlap(generated: list[int], end: tuple[int, ...]) -> int:
    """Return how many tokens of `end` the generated tokens end with; fewer than all of them."""
    return next(n for n in range(len(end) - 1, -1, -1) if not n or tuple(generated[-n:]) == end[:n])
