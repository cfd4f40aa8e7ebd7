"""Tests of the draft length policy in a simulation: it costs little and gains nearly all that is possible."""

from collections.abc import Callable

import numpy as np
import pytest

from quire.data.step_plan import Ints
from quire.sched.proposers.adaptive_length import AdaptiveDraftLength

MOST = 8
NUM_STEPS = 700

COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda num_tokens: 1 + 0.002 * num_tokens,
    "linear": lambda num_tokens: 0.02 + num_tokens,
    "mixed": lambda num_tokens: max(1.0, num_tokens / 32) + 0.002 * num_tokens,
}
"""Seconds per step of a memory-bound GPU, a CPU, and a compute-bound GPU."""


def rate(
    cost: Callable[[int], float], num_rows: int, chance: Callable[[int], float], is_burst: bool = False
) -> float:
    """Return tokens per second with noisy step times, of which one in a hundred is far too long.

    In a burst either all drafts of a row are accepted or none.
    """
    rng = np.random.default_rng(0)
    rows, pace = np.arange(num_rows, dtype=np.int32), AdaptiveDraftLength(max_rows=num_rows, max_drafts=MOST)
    for row in rows.tolist():
        pace.admit(row)
    num_tokens = seconds = 0.0
    for step in range(NUM_STEPS):
        lengths = pace.lengths(rows)
        is_right = rng.random((num_rows, MOST)) < chance(step)
        is_right = is_right[:, :1] & np.ones(MOST, np.bool_) if is_burst else is_right
        accepted = np.minimum(is_right.cumprod(1).sum(1), lengths).astype(np.int32)
        size = num_rows + int(lengths.sum())
        took = cost(size) * (1 + 0.03 * abs(rng.standard_normal())) * (5 if rng.random() < 0.01 else 1)
        pace.learn(rows, lengths, accepted)
        pace.record_time(size, num_rows, int(accepted.sum()), took)
        num_tokens += num_rows + int(accepted.sum())
        seconds += cost(size)
    return num_tokens / seconds


def fixed_length_rate(cost: Callable[[int], float], num_rows: int, chance: float, length: int) -> float:
    """Return tokens per second with a fixed number of drafts."""
    tokens = sum(chance**place for place in range(length + 1))
    return num_rows * tokens / cost(num_rows * (1 + length))


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("name", COSTS)
def test_pace_is_near_the_best_length_and_never_much_slower_than_plain(
    name: str, chance: float, num_rows: int
) -> None:
    cost = COSTS[name]
    rates = [fixed_length_rate(cost, num_rows, chance, length) for length in range(MOST + 1)]
    actual = rate(cost, num_rows, lambda step: chance)
    assert actual >= 0.97 * rates[0]
    if max(rates) > 1.1 * rates[0]:
        assert actual >= 0.9 * max(rates)


@pytest.mark.parametrize("name", COSTS)
def test_pace_adapts_to_changing_acceptance(name: str) -> None:
    """Check drafts that are alternately all wrong and nearly all correct."""
    cost = COSTS[name]
    halves = [fixed_length_rate(cost, 4, chance, MOST if chance else 0) for chance in (0.0, 0.95)]
    actual = rate(cost, 4, lambda step: 0.95 * (step // 100 % 2))
    assert actual >= 0.97 * halves[0]
    if name != "linear":
        assert actual >= 0.75 * np.mean(halves)


def test_bursts_of_accepted_drafts_are_used() -> None:
    def cost(num_tokens: int) -> float:
        return 1 + 0.3 * num_tokens

    best = (1 + 0.7 * MOST) / cost(1 + MOST)
    assert rate(cost, 1, lambda step: 0.7, is_burst=True) >= 0.85 * best


def free_drafts_pace(num_rows: int) -> AdaptiveDraftLength:
    """Return a pace for which drafts cost nothing and all were accepted."""
    pace, rows = AdaptiveDraftLength(max_rows=num_rows, max_drafts=MOST), np.arange(num_rows, dtype=np.int32)
    for _ in range(20):
        lengths = pace.lengths(rows)
        pace.learn(rows, lengths, lengths)
        pace.record_time(num_rows + int(lengths.sum()), num_rows, int(lengths.sum()), 1.0)
    return pace


def test_draft_lengths_respect_available_drafts_and_budget() -> None:
    pace, rows = free_drafts_pace(8), np.arange(8, dtype=np.int32)
    assert pace.lengths(rows).tolist() == [MOST] * 8
    available: Ints = np.array([0, 1, 2, 3, 9, 9, 0, 4], np.int32)
    assert (pace.lengths(rows, available) <= np.minimum(available, MOST)).all()
    assert 0 < int(pace.lengths(rows, budget=11).sum()) <= 11
    assert pace.lengths(rows, budget=0).tolist() == [0] * 8
    assert pace.lengths(rows[:0]).tolist() == []


def test_pace_is_deterministic() -> None:
    assert rate(COSTS["mixed"], 4, lambda step: 0.6) == rate(COSTS["mixed"], 4, lambda step: 0.6)


def test_acceptance_is_tracked_per_row() -> None:
    """Check rows of which half always accept: only these get drafts when drafts are expensive."""
    pace, rows = AdaptiveDraftLength(max_rows=8, max_drafts=4), np.arange(8, dtype=np.int32)
    total = np.zeros(8)
    for _ in range(300):
        lengths = pace.lengths(rows)
        accepted = np.where(rows < 4, lengths, 0).astype(np.int32)
        pace.learn(rows, lengths, accepted)
        size = 8 + int(lengths.sum())
        pace.record_time(size, 8, int(accepted.sum()), 1 + size / 16)
        total += lengths
    assert total[:4].min() > 4 * total[4:].max()


def test_acceptance_is_tracked_per_kind_of_draft() -> None:
    """Check that acceptance of sure drafts does not carry over to other drafts of the next request."""
    pace = AdaptiveDraftLength(max_rows=2, max_drafts=4, num_kinds=2)
    likely, unlikely = np.array([1]), np.array([0])
    for row in (likely, unlikely):
        for _ in range(60):
            lengths = pace.lengths(row)
            accepted = lengths if row is likely else np.zeros(1, np.int32)
            pace.learn(row, lengths, accepted)
            pace.record_time(1 + int(lengths[0]), 1, int(accepted[0]), 1 + 0.3 * lengths[0])
    pace.admit(1)
    assert pace.lengths(np.array([3])).tolist() == [4]
    assert pace.lengths(np.array([2])).sum() <= 2  # a trial draft


def test_first_steps_of_a_batch_size_are_ignored() -> None:
    """Check slow first steps, which on a CPU are computed eagerly and then recorded."""
    pace, rows, seen = AdaptiveDraftLength(max_rows=1, max_drafts=4), np.zeros(1, np.int32), dict[int, int]()
    last = 0
    for _ in range(40):
        last = int(pace.lengths(rows)[0])
        seen[last] = seen.get(last, 0) + 1
        pace.learn(rows, np.array([last], np.int32), np.array([last], np.int32))
        pace.record_time(1 + last, 1, last, (1 + 0.2 * last) * (6 if seen[last] < 3 else 1))
    assert last == 4


def test_cost_of_unmeasured_batch_sizes_is_estimated() -> None:
    """Check drafts that cost as much as they gain: they are hardly tried with fewer rows either."""
    pace, num_drafts = AdaptiveDraftLength(max_rows=8, max_drafts=MOST), []
    for num_rows in [8] * 100 + [5] * 20:
        rows = np.arange(num_rows, dtype=np.int32)
        lengths = pace.lengths(rows)
        pace.learn(rows, lengths, lengths)
        size = num_rows + int(lengths.sum())
        pace.record_time(size, num_rows, int(lengths.sum()), size / num_rows)
        num_drafts.append(int(lengths.sum()))
    assert max(num_drafts[:20]) > 16 and sum(num_drafts[100:]) <= 16
