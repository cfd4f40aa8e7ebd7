"""Tests of prompt lookup: the index matches a search through the whole text, whichever way the text grows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sched.proposers import ngram, text
from quire.sched.proposers.ngram import MAX_PLACES, NGram


def search_proposal(tokens: list[int], most: int, min_n: int, max_n: int) -> list[int]:
    """Return the proposal that a linear search finds."""
    places = [at for at in range(min_n, len(tokens)) if tokens[at - min_n : at] == tokens[-min_n:]]
    places = places[::-1][:MAX_PLACES]
    if not places or most < 1:
        return []

    def num_matching(place: int) -> int:
        lengths = [*range(min_n, max_n + 1), 2 * max_n, 4 * max_n, ngram.CONTEXT]
        return max(n for n in lengths if place >= n and tokens[place - n : place] == tokens[-n:])

    place = max(places, key=num_matching)  # the first of equal matches
    return [tokens[place + at % (len(tokens) - place)] for at in range(most)]


def ints(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


@settings(max_examples=50, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=8),
    min_n=st.integers(1, 3),
    extra_n=st.integers(0, 2),
    most=st.integers(0, 6),
    is_asked=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_proposal_matches_linear_search(
    pieces: list[list[int]], min_n: int, extra_n: int, most: int, is_asked: list[bool]
) -> None:
    """Check texts that grow before and after they are sorted, and that are sorted again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MIN_RECENT", 10)
        proposer = NGram(min_n, min_n + extra_n)
        tokens = pieces[0]
        proposer.admit(3, ints(tokens))
        for piece, is_proposing in zip([*pieces[1:], []], is_asked, strict=False):
            if is_proposing:
                expected = search_proposal(tokens, most, min_n, min_n + extra_n)
                assert proposer.propose(3, most).tolist() == expected
            tokens = tokens + piece
            proposer.extend(3, ints(piece))
        assert proposer.propose(3, most).tolist() == search_proposal(tokens, most, min_n, min_n + extra_n)


def test_longest_matching_context_wins() -> None:
    """Check that the longest match wins over the latest match, which would propose 30."""
    proposer = NGram(2, 2)
    proposer.admit(0, ints([7, 8, 1, 2, 20, 21, 9, 1, 2, 30, 31, 7, 8, 1, 2]))
    assert proposer.propose(0, 2).tolist() == [20, 21]


def test_repeating_text_is_continued() -> None:
    proposer = NGram(2, 2)
    proposer.admit(0, ints([5, 6, 7, 5, 6, 7, 5]))
    assert proposer.propose(0, 7).tolist() == [6, 7, 5, 6, 7, 5, 6]


def test_rows_are_independent_and_freed() -> None:
    proposer = NGram(2, 2)
    proposer.admit(0, ints([1, 2, 3, 1, 2]))
    proposer.admit(1, ints([1, 2]))
    assert proposer.propose(1, 3).tolist() == []
    proposer.release(0, ints([1, 2, 3, 1, 2]))
    proposer.admit(0, ints([1, 2]))
    assert proposer.propose(0, 3).tolist() == []


@pytest.mark.parametrize(("agreeing", "is_sure"), [(ngram.SURE - 1, False), (ngram.SURE, True)])
def test_proposal_is_sure_after_a_long_match(agreeing: int, is_sure: bool) -> None:
    """Check a single match, of which only the last tokens are compared to find it."""
    proposer = NGram(3, 3)
    second = list(range(10, 10 + agreeing))
    proposer.admit(0, ints([1, *second, 5, 6, 2, *second]))
    assert proposer.propose(0, 2).tolist() == [5, 6]
    assert proposer.is_sure == is_sure
