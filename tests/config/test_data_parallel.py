"""Tests of the placement of engine cores and of the processes that connect to them."""

from typing import Any

import pytest

from quire.config.data_parallel import Topology, lay_out
from quire.config.sections import ParallelSection
from quire.errors import ConfigError


def laid_out(*, headless: bool = False, api_server_count: int | None = None, **settings: Any) -> Topology:
    named = {f"data_parallel_{name}": value for name, value in settings.items()}
    section = ParallelSection(device="cpu", cpu_threads=1, **named)
    return lay_out(section, headless=headless, api_server_count=api_server_count)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Topology(1, range(1), range(1), 1)),
        ({"size": 3}, Topology(3, range(3), range(3), 3)),
        ({"size": 2, "api_server_count": 4}, Topology(2, range(2), range(2), 4)),
        ({"size": 4, "size_local": 2}, Topology(4, range(2), range(4), 4)),
        ({"size": 4, "size_local": 0}, Topology(4, range(0), range(4), 4)),
        (
            {"size": 4, "size_local": 2, "start_rank": 2, "headless": True},
            Topology(4, range(2, 4), range(0), 0),
        ),
        (
            {"size": 4, "size_local": 2, "start_rank": 2, "hybrid_lb": True},
            Topology(4, range(2, 4), range(2, 4), 2),
        ),
        ({"size": 4, "size_local": 2, "hybrid_lb": True}, Topology(4, range(2), range(2), 2)),
        ({"size": 4, "size_local": 2, "start_rank": 2}, Topology(4, range(2, 4), range(2, 4), 2)),
        ({"size": 4, "rank": 3}, Topology(4, range(3, 4), range(3, 4), 1)),
        ({"size": 4, "rank": 0, "external_lb": True}, Topology(4, range(1), range(1), 1)),
    ],
    ids=str,
)
def test_topology(settings: dict[str, Any], expected: Topology) -> None:
    topology = laid_out(**settings)
    assert topology == expected
    assert topology.remote == [rank for rank in expected.served if rank not in expected.local]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 2, "rank": 2}, "rank 2 is out of range: data_parallel_size is 2"),
        ({"size": 4, "size_local": 3, "start_rank": 2}, "goes beyond data_parallel_size=4"),
        ({"size": 2, "external_lb": True}, "needs data_parallel_rank"),
        ({"size": 2, "hybrid_lb": True}, "needs data_parallel_size_local"),
        ({"size": 2, "size_local": 1, "hybrid_lb": True, "external_lb": True}, "exclude each other"),
        ({"size": 2, "rank": 1, "size_local": 2}, "contradicts data_parallel_rank"),
        ({"size": 2, "headless": True}, "2 of 2 data-parallel ranks are here"),
        ({"headless": True}, "1 of 1 data-parallel ranks are here"),
        ({"size": 2, "size_local": 1, "headless": True, "api_server_count": 2}, "no API processes"),
        ({"api_server_count": 0}, "is for headless servers"),
    ],
    ids=str,
)
def test_contradictions_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        laid_out(**settings)
