"""Timestamp tokens, and the alignment of tokens with audio."""

import msgspec


class TimestampTokens(msgspec.Struct, frozen=True):
    """Timestamp tokens, which are the last tokens of the vocabulary, and the limit of the first timestamp."""

    zero: int
    """Token of 0 seconds; the token before it is `<|notimestamps|>`."""
    end: int
    """Token id of eos; text tokens have smaller ids."""
    max_first: int | None = None
    """Largest first timestamp, in timestamp tokens after the token of 0 seconds; None: no limit."""


class AlignmentHeads(msgspec.Struct, frozen=True):
    """Request to align the tokens of a prompt with the audio."""

    first: int
    """Position of the first token to align; earlier tokens are the transcription prompt."""
    num_states: int
    """Number of encoder states of the audio; later states are silence."""
