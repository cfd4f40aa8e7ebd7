"""Proposers of draft tokens that need only the tokens of requests: their interface and the factory."""

from typing import Protocol

from quire.config.speculation import SpecFacts
from quire.data.step_plan import Ints
from quire.sched.proposers.ngram import NGram
from quire.sched.proposers.suffix import Suffix

NUM_DRAFT_KINDS = 2
"""Number of kinds of drafts with separate acceptance rates: ordinary ones, and sure ones
(`Proposer.is_sure`)."""


class Proposer(Protocol):
    """Proposes draft tokens for the requests in their rows."""

    is_sure: bool
    """Whether the last proposal is more likely to be right than ordinary ones."""

    def admit(self, row: int, tokens: Ints, salt: str | None = None) -> None:
        """Assign a request with these known tokens to a row. Its drafts must not be taken from requests with
        another cache salt."""

    def extend(self, row: int, tokens: Ints) -> None:
        """Append new tokens to the request of a row."""

    def release(self, row: int, tokens: Ints) -> None:
        """Free a row; `tokens` are all tokens of its request, prompt and output."""

    def propose(self, row: int, max_drafts: int) -> Ints:
        """Return up to `max_drafts` likely next tokens; empty if there is no match."""


def proposer_of(facts: SpecFacts) -> Proposer | None:
    """Return the proposer of a speculative decoding method; None if a draft model proposes the tokens."""
    if facts.method == "ngram":
        assert facts.prompt_lookup_min is not None and facts.prompt_lookup_max is not None
        return NGram(facts.prompt_lookup_min, facts.prompt_lookup_max)
    if facts.method == "suffix":
        return Suffix(
            max_depth=facts.suffix_decoding_max_tree_depth,
            max_requests=facts.suffix_decoding_max_cached_requests,
            spec_factor=facts.suffix_decoding_max_spec_factor,
            min_prob=facts.suffix_decoding_min_token_prob,
        )
    return None
