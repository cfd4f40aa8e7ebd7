"""The planning benchmark really plans: every step it times has all requests decoding."""

import pytest

from quire.bench.sched import measure, measure_waste


@pytest.mark.parametrize("depth", [1, 2])
def test_a_time_for_plan_and_update_of_each_step(depth: int) -> None:
    times = measure(8, 5, prefix_caching=True, depth=depth)
    assert times.shape == (5, 2) and (times > 0).all()


def test_waste_is_a_small_share_of_the_cache() -> None:
    """Less than one block of sixteen per request, on requests of hundreds of tokens."""
    assert 0 < measure_waste(12) < 0.1
