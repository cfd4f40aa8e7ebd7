"""Follower: one request whose text must fit a grammar, or whose reasoning must come to an end."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Protocol, Self

from quire.data.params import ReasoningIds, SamplingParams
from quire.data.plan import Verdict
from quire.data.request import Request


class GrammarMatcher(Protocol):
    """Where a sequence stands in its grammar."""

    def advance(self, token_id: int) -> Verdict: ...

    def copy(self) -> Self:
        """One that stands at the same place."""


class Follower:
    """What one request may say next, by the tokens that it has said.

    It may begin with reasoning, which no grammar is about: that opens with certain tokens, or the prompt has
    opened it, and ends with others. Who does not open it has none.
    """

    def __init__(self, matcher: GrammarMatcher | None, params: SamplingParams) -> None:
        """Without a matcher only the reasoning has a limit."""
        self._matcher = matcher
        self._budget = params.thinking_token_budget
        self._reasoning: ReasoningIds | None = params.reasoning
        """None once it is over."""
        self._is_open = self._reasoning is not None and self._reasoning.open
        self._said: list[int] = []
        """Since it was to open, or since it did."""
        self._instead: GrammarMatcher | None = None
        """Where the grammar would be if what seems to open the reasoning were text already."""
        if self._reasoning is not None and not self._is_open:
            if not self._reasoning.start:
                self._reasoning = None
            elif matcher is not None:
                self._instead = matcher.copy()

    @property
    def is_free(self) -> bool:
        """Whether nothing is asked of it any more."""
        return self._reasoning is None and self._matcher is None

    @property
    def bound(self) -> GrammarMatcher | None:
        """What alone decides of it from now on: a grammar, behind all reasoning."""
        return self._matcher if self._reasoning is None else None

    @property
    def matcher(self) -> GrammarMatcher | None:
        """Whose tokens may come next; None if another thing decides."""
        return self._matcher if self._reasoning is None else self._instead

    @property
    def also(self) -> int | None:
        """A token that may come beside them; alone, if there is no matcher."""
        if self._reasoning is None:
            return None
        if not self._is_open:
            return None if self._matcher is None else self._reasoning.start[len(self._said)]
        if self._budget is None or len(self._said) < self._budget:
            return None
        return self._reasoning.end[_overlap(self._said, self._reasoning.end)]

    def along(self, drafts: Sequence[int]) -> Iterator[Self]:
        """It, where it stands, then as it would be behind each of these tokens, as far as it may go."""
        here = self
        yield here
        for token_id in drafts:
            here = here.copy()
            if here.advance(token_id) or here.is_free:
                return
            yield here

    def copy(self) -> Self:
        """One that stands at the same place."""
        made = copy(self)
        made._said = list(self._said)
        made._matcher, made._instead = (
            None if each is None else each.copy() for each in (self._matcher, self._instead)
        )
        return made

    def advance(self, token_id: int) -> Verdict:
        """It has said one more. Says whether it is over with it, and how."""
        if self._reasoning is None:
            return "" if self._matcher is None else self._matcher.advance(token_id)
        self._said.append(token_id)
        if not self._is_open:
            return self._open(self._reasoning.start, token_id)
        end = list(self._reasoning.end)
        if self._said[-len(end) :] == end:
            self._reasoning = None
        return ""

    def _open(self, start: tuple[int, ...], token_id: int) -> Verdict:
        if tuple(self._said) == start:
            self._is_open, self._said, self._instead = True, [], None
            return ""
        verdict = "" if self._instead is None else self._instead.advance(token_id)
        if tuple(self._said) != start[: len(self._said)]:
            if self._matcher is not None and self._instead is None:
                return "error"
            self._reasoning, self._matcher = None, self._instead
        elif verdict in ("error", "limit"):
            self._instead, verdict = None, ""
        return verdict


def follower_of(request: Request, matcher: GrammarMatcher | None) -> Follower:
    """Return the follower of a request that gets its first row here: behind its output so far, which is not
    empty if another core began it."""
    follower = Follower(matcher, request.params)
    for token_id in request.tokens[request.prompt_len :]:
        follower.advance(token_id)
    return follower


def _overlap(said: list[int], end: tuple[int, ...]) -> int:
    """How much of `end` stands at the end of what was said; less than all of it."""
    return next(n for n in range(len(end) - 1, -1, -1) if not n or tuple(said[-n:]) == end[:n])
