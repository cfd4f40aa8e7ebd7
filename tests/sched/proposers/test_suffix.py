"""Tests of suffix decoding: proposals match counting through all texts, and the pool stays bounded."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.speculation import SpecFacts
from quire.sched.proposers import proposer_of, suffix, text
from quire.sched.proposers.ngram import NGram
from quire.sched.proposers.suffix import MIN_MATCH, NUM_SALTS, Suffix

END = -1


def ints(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def counted(
    own_tokens: list[int], answers: list[list[int]], most: int, depth: int, factor: float, min_prob: float
) -> list[int]:
    """Return the proposal that counting every suffix in every text gives."""
    pool = [END] * MIN_MATCH + [token for answer in answers for token in [*answer, END]]
    best, actual = 0.0, []
    for tokens in (own_tokens, pool):
        score, guess = _guess(tokens, own_tokens, most, depth, factor, min_prob)
        if score > best:
            best, actual = score, guess
    return actual


def _guess(
    tokens: list[int], own_tokens: list[int], most: int, depth: int, factor: float, min_prob: float
) -> tuple[float, list[int]]:
    for length in range(min(depth, len(own_tokens)), MIN_MATCH - 1, -1):
        places = [at for at in range(length, len(tokens)) if tokens[at - length : at] == own_tokens[-length:]]
        if not places:
            continue
        guess: list[int] = []
        score, total = 0.0, len(places)
        while len(guess) < min(most, int(factor * length)):
            known = tokens + guess
            following = Counter(known[at + len(guess)] for at in reversed(places))
            token, count = following.most_common(1)[0]
            if token == END or count < min_prob * total:
                break
            places = [at for at in places if known[at + len(guess)] == token]
            guess.append(token)
            score += count / total
        return score, guess
    return 0.0, []


answer = st.lists(st.integers(0, 2), min_size=MIN_MATCH + 1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(answer, max_size=2),
    prompt=st.lists(st.integers(0, 2), max_size=10),
    pieces=st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=4),
    most=st.integers(0, 6),
    depth=st.integers(MIN_MATCH, 8),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    min_prob=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
)
def test_proposal_matches_counting(
    answers: list[list[int]],
    prompt: list[int],
    pieces: list[list[int]],
    most: int,
    depth: int,
    factor: float,
    min_prob: float,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MIN_RECENT", 6)
        patch.setattr(suffix, "MAX_PLACES", 99)
        proposer = Suffix(max_depth=depth, max_requests=100, spec_factor=factor, min_prob=min_prob)
        for message in answers:
            proposer.admit(1, ints([7, 8]))
            proposer.extend(1, ints(message))
            proposer.release(1, ints([7, 8, *message]))
        own_tokens = prompt
        proposer.admit(0, ints(own_tokens))
        for piece in [*pieces, []]:
            expected = counted(own_tokens, answers, most, depth, factor, min_prob)
            assert proposer.propose(0, most).tolist() == expected
            own_tokens = own_tokens + piece
            proposer.extend(0, ints(piece))


def test_most_frequent_continuation_is_proposed_until_unlikely() -> None:
    proposer = Suffix(max_depth=8, max_requests=100, spec_factor=4, min_prob=0.5)
    for message in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 7]):
        proposer.admit(0, ints([]))
        proposer.release(0, ints(message))
    proposer.admit(0, ints([1, 2, 3]))
    assert proposer.propose(0, 9).tolist() == [4]


def test_prompts_are_not_shared_between_requests() -> None:
    proposer = Suffix(max_depth=8, max_requests=8, spec_factor=4, min_prob=0)
    proposer.admit(0, ints([1, 2, 3, 4, 5, 6]))
    proposer.release(0, ints([1, 2, 3, 4, 5, 6, 9, 9, 9, 9]))
    proposer.admit(0, ints([1, 2, 3]))
    assert proposer.propose(0, 3).tolist() == []


@pytest.mark.parametrize("limits", [{"max_requests": 8}, {"max_requests": 1000, "max_tokens": 48}])
def test_old_outputs_are_evicted(limits: dict[str, int]) -> None:
    proposer = Suffix(max_depth=8, spec_factor=4, min_prob=0, **limits)
    for number in range(50):
        message = [number, number, number, 100 + number, 200 + number]
        proposer.admit(0, ints([]))
        proposer.release(0, ints(message))
    actual = []
    for number in range(50):
        proposer.admit(0, ints([number] * 3))
        actual.append(proposer.propose(0, 2).tolist())
        proposer.release(0, ints([number] * 3))
    assert actual[-1] == [149, 249] and 1 <= sum(guess != [] for guess in actual) <= 8
    nothing = Suffix(max_depth=8, spec_factor=4, min_prob=0, max_requests=0)
    nothing.admit(0, ints([]))
    nothing.release(0, ints([1, 2, 3, 4, 5]))
    nothing.admit(0, ints([1, 2, 3]))
    assert nothing.propose(0, 2).tolist() == []


def test_config_selects_the_proposer() -> None:
    chosen = []
    for config in ({"method": "ngram", "num_speculative_tokens": 2}, {"method": "suffix"}):
        facts = SpecFacts.of({"speculative_config": config}, max_model_len=64)
        assert facts is not None
        chosen.append(type(proposer_of(facts)))
    assert chosen == [NGram, Suffix]


def test_outputs_of_another_salt_are_not_proposed() -> None:
    """Check that draft acceptance does not reveal one tenant's outputs to another."""
    proposer = Suffix(max_depth=8, max_requests=8, spec_factor=4, min_prob=0)

    def answered(salt: str | None) -> None:
        proposer.admit(0, ints([]), salt)
        proposer.release(0, ints([1, 2, 3, 4, 5, 6]))

    def proposed(salt: str | None) -> list[int]:
        proposer.admit(1, ints([1, 2, 3]), salt)
        tokens = proposer.propose(1, 3).tolist()
        proposer.release(1, ints([1, 2, 3]))
        return tokens

    answered("a")
    assert (proposed("a"), proposed("b"), proposed(None)) == ([4, 5, 6], [], [])
    answered(None)
    assert (proposed(None), proposed("b")) == ([4, 5, 6], [])
    for number in range(2 * NUM_SALTS):
        answered(f"salt {number}")
    assert len(proposer._salted) == NUM_SALTS and not proposed("a")
