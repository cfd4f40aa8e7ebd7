"""Moments: the tokens by which a model tells the time."""

import msgspec


class TimestampTokens(msgspec.Struct, frozen=True):
    """Where they are in the vocabulary, all behind whatever else there is, and how the first is limited."""

    zero: int
    """That of 0 seconds; the token before it says that none is told."""
    end: int
    """What ends an answer: texts are below it."""
    max_first: int | None = None
    """How many moments after 0 seconds the first may be at most; None: any number."""


class AlignmentHeads(msgspec.Struct, frozen=True):
    """A prompt of which somebody wants to know when each of its tokens was said."""

    first: int
    """Where these begin; those in front are what the model was asked."""
    num_states: int
    """Of its sound: what is behind is silence."""
