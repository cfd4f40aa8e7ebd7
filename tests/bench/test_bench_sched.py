"""Tests that every step of the planning benchmark has all requests decoding."""

import pytest

from quire.bench.sched import measure, measure_waste


@pytest.mark.parametrize("depth", [1, 2])
def test_plan_and_update_of_each_step_are_timed(depth: int) -> None:
    times = measure(8, 5, prefix_caching=True, depth=depth)
    assert times.shape == (5, 2) and (times > 0).all()


def test_waste_is_a_small_share_of_the_cache() -> None:
    """Check for less than one block of sixteen per request, with requests of hundreds of tokens."""
    assert 0 < measure_waste(12) < 0.1
