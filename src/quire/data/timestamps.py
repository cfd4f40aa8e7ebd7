"""Timestamp tokens, and the alignment of tokens with audio."""

import msgspec


class TimestampTokens(msgspec.Struct, frozen=True):
    """Timestamp tokens, which are the last of the vocabulary, and the limit of the first one."""

    zero: int
    """Token of 0 seconds; the token before it is `<|notimestamps|>`."""
    end: int
    """eos token; text tokens are below it."""
    max_first: int | None = None
    """Largest first timestamp, as a number of timestamp tokens after 0 seconds; None: no limit."""


class AlignmentHeads(msgspec.Struct, frozen=True):
    """Request to align the tokens of a prompt with the audio."""

    first: int
    """Start of the tokens to align; those before are the transcription prompt."""
    num_states: int
    """Number of encoder states of the audio; later ones are silence."""
