"""Drafts that are found in tokens alone: what a proposer has to do, and who does."""

from typing import Protocol

from quire.config.speculation import SpecFacts
from quire.data.plan import Ints
from quire.sched.proposers.ngram import NGram
from quire.sched.proposers.suffix import Suffix

SORTS = 2
"""Of drafts: such as are likely as any, and others that are sure."""


class Proposer(Protocol):
    """Guesses how the requests in their rows go on."""

    is_sure: bool
    """Whether the last proposal has more reason to be right than others have."""

    def admit(self, row: int, tokens: Ints, salt: str | None = None) -> None:
        """A request takes a row, with all tokens that are known so far. Nothing of a request with another
        salt may be proposed to it."""

    def extend(self, row: int, tokens: Ints) -> None:
        """It got these."""

    def release(self, row: int, tokens: Ints) -> None:
        """It leaves; all its tokens."""

    def propose(self, row: int, most: int) -> Ints:
        """Up to `most` likely next tokens; empty: no idea."""
        ...


def proposer_of(facts: SpecFacts) -> Proposer | None:
    """None where drafts are made by a model."""
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
