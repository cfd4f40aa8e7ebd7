"""Tests of the refusal of requests that would miss their target by far."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.data.latency_target import LatencyTarget
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.stats import Backlog
from quire.errors import TooMany
from quire.frontend.expected_wait import check_expected_wait


def link(num_tokens: int, *, unreported: int = 0, up: bool = True) -> Any:
    """Return a connection to a core that computes 1,000 prompt tokens per second."""
    stats = SimpleNamespace(backlog=Backlog(1000.0, [(0, 0, num_tokens)]))
    return SimpleNamespace(core=object() if up else None, stats=stats, num_unreported=unreported)


def request(ttft_s: float) -> Request:
    params = SamplingParams()
    made = Request(id="a", tokens=[1] * 500, params=params, prompt_len=500, limit=600, seed=0)
    made.target = LatencyTarget(ttft_s)
    return made


def test_request_is_refused_beyond_the_maximum_wait() -> None:
    check_expected_wait(request(1.0), [link(3500)], 4.0)
    with pytest.raises(TooMany, match=r"expected in 6\.5 s, and its target is 1 s") as error:
        check_expected_wait(request(1.0), [link(6000)], 4.0)
    assert error.value.retry_after_s == 6 and error.value.status == 429
    check_expected_wait(request(1.0), [link(6000)], 0.0)
    check_expected_wait(request(0.0), [link(60_000)], 4.0)


def test_best_core_counts_and_tokens_on_their_way() -> None:
    check_expected_wait(request(1.0), [link(6000), link(100)], 4.0)
    with pytest.raises(TooMany):
        check_expected_wait(request(1.0), [link(100, unreported=6000)], 4.0)
    with pytest.raises(TooMany):
        check_expected_wait(request(1.0), [link(6000), link(0, up=False)], 4.0)
    check_expected_wait(request(1.0), [link(6000, up=False)], 4.0)
