"""Drafts that are found in tokens alone: what a proposer has to do."""

from typing import Protocol

from quire.data.plan import Ints


class Proposer(Protocol):
    """Guesses how the requests in their rows go on."""

    def admit(self, row: int, tokens: Ints) -> None:
        """A request takes a row, with all tokens that are known so far."""

    def extend(self, row: int, tokens: Ints) -> None:
        """It got these."""

    def release(self, row: int, tokens: Ints) -> None:
        """It leaves; all its tokens."""

    def propose(self, row: int, most: int) -> Ints:
        """Up to `most` likely next tokens; empty: no idea."""
        ...
