"""Groups over Gloo: who is in which, and what they tell each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from quire.config.parallel import Rank
from quire.config.sections import ParallelSection
from quire.parallel.group import ALONE, Group, TorchGroup
from quire.parallel.staged import StagedGroup
from quire.parallel.world import World


def collected(tp: Group, x: Tensor) -> dict[str, Any]:
    return {
        "sum": tp.all_reduce(x.clone()).tolist(),
        "columns": tp.gather(x).tolist(),
        "rows": tp.gather(x, 0).tolist(),
        "share": tp.reduce_scatter(x.clone()).tolist(),
        "swapped": tp.all_to_all(x, [1, 1], [1, 1]).tolist(),
    }


def talk(world: World) -> dict[str, Any]:
    tp, pp, place = world.tp, world.pp, world.rank
    x = torch.arange(4.0).view(2, 2) + 10 * tp.rank
    told = {
        "place": (place.dp, place.pp, place.tp),
        "groups": [(group.rank, group.size) for group in (tp, pp, world.ep)],
        **collected(tp, x),
    }
    assert isinstance(tp, TorchGroup) and isinstance(pp, TorchGroup)
    told["staged"] = collected(StagedGroup(tp.group), x.bfloat16())
    for stages in (pp, StagedGroup(pp.group)):
        y = torch.full((3,), float(tp.rank))
        if stages.rank == 0:
            stages.send(y, 1)
            stages.isend(y, 1).wait()
        else:
            stages.receive(y, 0)
            stages.receive(y.fill_(-1), 0)
        told["heard"] = y.tolist()
    return told


@pytest.mark.slow
def test_two_stages_of_two(tmp_path: Path) -> None:
    told = run_ranks(tmp_path, talk, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [each["place"] for each in told] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [each["groups"] for each in told] == [
        [(tp, 2), (pp, 2), (0, 1)] for pp in range(2) for tp in range(2)
    ]
    for each in told:
        tp = each["place"][2]
        assert each["sum"] == [[10, 12], [14, 16]]
        assert each["columns"] == [[0, 1, 10, 11], [2, 3, 12, 13]]
        assert each["rows"] == [[0, 1], [2, 3], [10, 11], [12, 13]]
        assert each["share"] == [[[10, 12]], [[14, 16]]][tp]
        assert each["swapped"] == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]][tp]
        assert each["heard"] == [tp] * 3
        assert each["staged"].items() <= each.items()


def seen(world: World) -> list[tuple[int, int]]:
    return [(group.rank, group.size) for group in (world.tp, world.pp, world.ep)]


@pytest.mark.slow
def test_experts_are_spread_over_copies(tmp_path: Path) -> None:
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    told = run_ranks(tmp_path, seen, **sizes)
    assert told == [[(tp, 2), (0, 1), (2 * dp + tp, 4)] for dp in range(2) for tp in range(2)]


@pytest.mark.parametrize("index", range(12))
def test_places_are_numbered(index: int) -> None:
    sizes = ParallelSection(device="cpu", cpu_threads=1, tensor_parallel_size=2, pipeline_parallel_size=3)
    assert Rank.of(index, sizes).index(sizes) == index


def test_alone() -> None:
    x = torch.arange(4.0).view(2, 2)
    assert ALONE.share(6) == 6 and ALONE.all_reduce(x) is x and ALONE.gather(x) is x
