"""The pace of drafts, simulated: it never costs much, and takes nearly all there is to win."""

from collections.abc import Callable

import numpy as np
import pytest

from quire.data.plan import Ints
from quire.sched.proposers.pace import Pace

MOST = 8
NUM_STEPS = 700

COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda num_tokens: 1 + 0.002 * num_tokens,
    "linear": lambda num_tokens: 0.02 + num_tokens,
    "mixed": lambda num_tokens: max(1.0, num_tokens / 32) + 0.002 * num_tokens,
}
"""Seconds of a step: a GPU that waits for its memory, a CPU, a GPU that has more to do than to read."""


def rate(
    cost: Callable[[int], float], num_rows: int, chance: Callable[[int], float], is_burst: bool = False
) -> float:
    """Tokens per second at a pace that sees what steps take with noise, one in a hundred far too long.
    In a burst all drafts of a row are right or none is."""
    rng = np.random.default_rng(0)
    rows, pace = np.arange(num_rows, dtype=np.int32), Pace(max_rows=num_rows, most=MOST)
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
        pace.timed(size, num_rows, int(accepted.sum()), took)
        num_tokens += num_rows + int(accepted.sum())
        seconds += cost(size)
    return num_tokens / seconds


def fixed(cost: Callable[[int], float], num_rows: int, chance: float, length: int) -> float:
    """Tokens per second with always so many drafts."""
    tokens = sum(chance**place for place in range(length + 1))
    return num_rows * tokens / cost(num_rows * (1 + length))


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("name", COSTS)
def test_it_is_never_much_slower_than_plain_and_nearly_as_fast_as_the_best_length(
    name: str, chance: float, num_rows: int
) -> None:
    cost = COSTS[name]
    rates = [fixed(cost, num_rows, chance, length) for length in range(MOST + 1)]
    found = rate(cost, num_rows, lambda step: chance)
    assert found >= 0.97 * rates[0]
    if max(rates) > 1.1 * rates[0]:
        assert found >= 0.9 * max(rates)


@pytest.mark.parametrize("name", COSTS)
def test_it_follows_what_changes(name: str) -> None:
    """Drafts that are all wrong, then nearly all right, and so on."""
    cost = COSTS[name]
    halves = [fixed(cost, 4, chance, MOST if chance else 0) for chance in (0.0, 0.95)]
    found = rate(cost, 4, lambda step: 0.95 * (step // 100 % 2))
    assert found >= 0.97 * halves[0]
    if name != "linear":
        assert found >= 0.75 * np.mean(halves)


def test_drafts_that_are_right_in_bursts_are_worth_their_cost() -> None:
    def cost(num_tokens: int) -> float:
        return 1 + 0.3 * num_tokens

    best = (1 + 0.7 * MOST) / cost(1 + MOST)
    assert rate(cost, 1, lambda step: 0.7, is_burst=True) >= 0.85 * best


def warm(num_rows: int) -> Pace:
    """For which drafts cost nothing, and all were right."""
    pace, rows = Pace(max_rows=num_rows, most=MOST), np.arange(num_rows, dtype=np.int32)
    for _ in range(20):
        lengths = pace.lengths(rows)
        pace.learn(rows, lengths, lengths)
        pace.timed(num_rows + int(lengths.sum()), num_rows, int(lengths.sum()), 1.0)
    return pace


def test_a_row_has_no_more_than_there_are_and_all_no_more_than_the_budget() -> None:
    pace, rows = warm(8), np.arange(8, dtype=np.int32)
    assert pace.lengths(rows).tolist() == [MOST] * 8
    available: Ints = np.array([0, 1, 2, 3, 9, 9, 0, 4], np.int32)
    assert (pace.lengths(rows, available) <= np.minimum(available, MOST)).all()
    assert 0 < int(pace.lengths(rows, budget=11).sum()) <= 11
    assert pace.lengths(rows, budget=0).tolist() == [0] * 8
    assert pace.lengths(rows[:0]).tolist() == []


def test_it_does_the_same_with_the_same() -> None:
    assert rate(COSTS["mixed"], 4, lambda step: 0.6) == rate(COSTS["mixed"], 4, lambda step: 0.6)


def test_rows_differ() -> None:
    """Half of them are always right: where drafts cost something these have them, the others hardly."""
    pace, rows = Pace(max_rows=8, most=4), np.arange(8, dtype=np.int32)
    total = np.zeros(8)
    for _ in range(300):
        lengths = pace.lengths(rows)
        accepted = np.where(rows < 4, lengths, 0).astype(np.int32)
        pace.learn(rows, lengths, accepted)
        size = 8 + int(lengths.sum())
        pace.timed(size, 8, int(accepted.sum()), 1 + size / 16)
        total += lengths
    assert total[:4].min() > 4 * total[4:].max()


def test_sorts_of_drafts_differ() -> None:
    """What was learned of drafts that were right is no reason to believe others in the next request."""
    pace = Pace(max_rows=2, most=4, sorts=2)
    likely, unlikely = np.array([1]), np.array([0])
    for row in (likely, unlikely):
        for _ in range(60):
            lengths = pace.lengths(row)
            accepted = lengths if row is likely else np.zeros(1, np.int32)
            pace.learn(row, lengths, accepted)
            pace.timed(1 + int(lengths[0]), 1, int(accepted[0]), 1 + 0.3 * lengths[0])
    pace.admit(1)
    assert pace.lengths(np.array([3])).tolist() == [4]
    assert pace.lengths(np.array([2])).sum() <= 2  # a trial


def test_the_first_steps_of_a_kind_do_not_say_what_it_costs() -> None:
    """On a CPU they are computed in other ways, then recorded, and take several times as long."""
    pace, rows, seen = Pace(max_rows=1, most=4), np.zeros(1, np.int32), dict[int, int]()
    last = 0
    for _ in range(40):
        last = int(pace.lengths(rows)[0])
        seen[last] = seen.get(last, 0) + 1
        pace.learn(rows, np.array([last], np.int32), np.array([last], np.int32))
        pace.timed(1 + last, 1, last, (1 + 0.2 * last) * (6 if seen[last] < 3 else 1))
    assert last == 4


def test_what_steps_of_other_rows_cost_is_taken_from_those_that_are_known() -> None:
    """All drafts are right, and cost as much as they give: with fewer rows, too, they are hardly tried."""
    pace, num_drafts = Pace(max_rows=8, most=MOST), []
    for num_rows in [8] * 100 + [5] * 20:
        rows = np.arange(num_rows, dtype=np.int32)
        lengths = pace.lengths(rows)
        pace.learn(rows, lengths, lengths)
        size = num_rows + int(lengths.sum())
        pace.timed(size, num_rows, int(lengths.sum()), size / num_rows)
        num_drafts.append(int(lengths.sum()))
    assert max(num_drafts[:20]) > 16 and sum(num_drafts[100:]) <= 16
