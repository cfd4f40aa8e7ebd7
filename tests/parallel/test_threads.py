"""Tests that thread groups match process groups."""

from typing import Any

import pytest
import torch
from threads import groups, run_threads

from quire.config.parallel import Rank
from quire.parallel.world import World


def talk(world: World) -> dict[str, Any]:
    tp = world.tp
    x = torch.arange(4.0).view(2, 2) + 10 * tp.rank
    y = torch.zeros(2, 2)
    tp.send(x, 1 - tp.rank)
    tp.receive(y, 1 - tp.rank)
    return {
        "sum": tp.all_reduce(x.clone()).tolist(),
        "columns": tp.gather(x).tolist(),
        "rows": tp.gather(x, 0).tolist(),
        "share": tp.reduce_scatter(x).tolist(),
        "swapped": tp.all_to_all(x, [1, 1], [1, 1]).tolist(),
        "heard": y.tolist(),
    }


def test_two_ranks_communicate() -> None:
    for rank, thread in enumerate(run_threads(2, talk)):
        assert thread["sum"] == [[10, 12], [14, 16]]
        assert thread["columns"] == [[0, 1, 10, 11], [2, 3, 12, 13]]
        assert thread["rows"] == [[0, 1], [2, 3], [10, 11], [12, 13]]
        assert thread["share"] == [[[10, 12]], [[14, 16]]][rank]
        assert thread["swapped"] == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]][rank]
        assert thread["heard"] == [[[10, 11], [12, 13]], [[0, 1], [2, 3]]][rank]


def fail(world: World) -> None:
    if world.tp.rank == 1:
        raise ValueError("rank 1 has no weights")
    world.tp.all_reduce(torch.zeros(1))


def test_error_in_one_thread_ends_all() -> None:
    with pytest.raises(ValueError, match="rank 1 has no weights"):
        run_threads(2, fail)


def stages(size: int) -> list[World]:
    return [World(Rank(pp=rank), pp=group) for rank, group in enumerate(groups(size))]


def test_custom_worlds() -> None:
    assert run_threads(2, lambda world: (world.tp.size, world.pp.rank), worlds=stages) == [(1, 0), (1, 1)]
