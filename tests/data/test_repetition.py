"""Tests of repetition detection: the definition, and counters that agree with it."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from quire.data.params import MAX_PATTERN_SIZE, RepetitionDetectionParams
from quire.data.repetition import RepetitionCounts


def find_repetition(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Return whether the tokens end in `min_count` copies of one pattern of the requested sizes.

    `RepetitionCounts` returns the same results with less work per token.
    """
    sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    for size in sizes:
        span = size * params.min_count
        if span > len(token_ids):
            return False
        if token_ids[-1] != token_ids[-1 - size]:
            continue
        tail = list(token_ids[-span:])
        if tail[size:] == tail[:-size]:
            return True
    return False


@pytest.mark.parametrize(
    ("tokens", "low", "high", "count", "expected"),
    [
        ([1, 2, 3, 4], 1, 4, 2, False),
        ([9, 5, 5, 5], 1, 4, 3, True),
        ([9, 5, 5], 1, 4, 3, False),
        ([5, 5, 5, 9], 1, 4, 3, False),
        ([7, 1, 2, 1, 2, 1, 2], 1, 2, 3, True),
        ([7, 1, 2, 1, 2, 1, 2], 1, 1, 3, False),
        ([5, 5, 5, 5], 2, 3, 2, True),
        ([5, 5, 5, 5], 3, 3, 2, False),
        ([1, 2, 3, 1, 4, 3], 3, 3, 2, False),
        ([1, 2, 3, 1, 2, 3], 0, 3, 2, True),
        ([], 1, 4, 2, False),
        ([5, 5, 5], 0, 0, 2, False),
    ],
)
def test_repetition_is_found_only_at_the_end_and_in_the_given_sizes(
    tokens: list[int], low: int, high: int, count: int, expected: bool
) -> None:
    params = RepetitionDetectionParams(max_pattern_size=high, min_pattern_size=low, min_count=count)
    assert find_repetition(tokens, params) is expected
    assert bool(find_repetition(np.array(tokens), params)) is expected  # type: ignore[arg-type]
    assert RepetitionCounts(params).is_repetition(np.array(tokens, np.int32)) is expected


def random_params(random: Random) -> RepetitionDetectionParams:
    high = random.choice([1, 2, 3, 5, 9, 40])
    return RepetitionDetectionParams(
        max_pattern_size=high, min_pattern_size=random.randint(0, high), min_count=random.choice([2, 2, 3, 5])
    )


def random_tokens(random: Random, count: int) -> list[int]:
    """Return tokens of a small alphabet with repeated stretches."""
    alphabet, tokens = random.randint(1, 3), list[int]()
    while len(tokens) < count:
        if tokens and random.random() < 0.3:
            tokens += tokens[-random.randint(1, 12) :] * random.randint(1, 3)
        else:
            tokens.append(random.randrange(alphabet))
    return tokens[:count]


@pytest.mark.parametrize("seed", range(60))
def test_counters_match_the_definition_at_every_token(seed: int) -> None:
    random = Random(seed)
    params, tokens = random_params(random), random_tokens(random, 120)
    counts = RepetitionCounts(params)
    row = np.array(tokens, np.int32)
    for length in range(1, len(tokens) + 1):
        expected = find_repetition(tokens[:length], params)
        assert counts.is_repetition(row[:length]) is expected, (params, tokens[:length])


@pytest.mark.parametrize("seed", range(40))
def test_counters_follow_an_output_that_jumps(seed: int) -> None:
    """Check jumps after `min_tokens`, after a preemption that restarts the counters, and to another
    sequence.
    """
    random = Random(seed)
    params = random_params(random)
    counts = RepetitionCounts(params)
    for _ in range(6):
        tokens = random_tokens(random, 80)
        for length in sorted(random.choices(range(len(tokens) + 1), k=12)):
            expected = find_repetition(tokens[:length], params)
            assert counts.is_repetition(np.array(tokens[:length], np.int32)) is expected


def test_huge_count_is_never_reached() -> None:
    params = RepetitionDetectionParams(max_pattern_size=MAX_PATTERN_SIZE, min_count=2**63 - 1)
    counts = RepetitionCounts(params)
    assert not any(counts.is_repetition(np.zeros(length, np.int32)) for length in range(1, 50))
