"""Tests of groups over Gloo: their members and collectives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from quire.config.parallel import Rank
from quire.config.sections import ParallelSection
from quire.parallel.group import ALONE, Group, TorchGroup
from quire.parallel.host_staged import StagedGroup
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
    message = {
        "place": (place.dp, place.pp, place.tp),
        "groups": [(group.rank, group.size) for group in (tp, pp, world.ep)],
        **collected(tp, x),
    }
    assert isinstance(tp, TorchGroup) and isinstance(pp, TorchGroup)
    message["staged"] = collected(StagedGroup(tp.group), x.bfloat16())
    for stages in (pp, StagedGroup(pp.group)):
        y = torch.full((3,), float(tp.rank))
        if stages.rank == 0:
            stages.send(y, 1)
            stages.isend(y, 1).wait()
        else:
            stages.receive(y, 0)
            stages.receive(y.fill_(-1), 0)
        message["heard"] = y.tolist()
    return message


@pytest.mark.slow
def test_two_stages_of_two_ranks(tmp_path: Path) -> None:
    message = run_ranks(tmp_path, talk, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [item["place"] for item in message] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [item["groups"] for item in message] == [
        [(tp, 2), (pp, 2), (0, 1)] for pp in range(2) for tp in range(2)
    ]
    for item in message:
        tp = item["place"][2]
        assert item["sum"] == [[10, 12], [14, 16]]
        assert item["columns"] == [[0, 1, 10, 11], [2, 3, 12, 13]]
        assert item["rows"] == [[0, 1], [2, 3], [10, 11], [12, 13]]
        assert item["share"] == [[[10, 12]], [[14, 16]]][tp]
        assert item["swapped"] == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]][tp]
        assert item["heard"] == [tp] * 3
        assert item["staged"].items() <= item.items()


def seen(world: World) -> list[tuple[int, int]]:
    return [(group.rank, group.size) for group in (world.tp, world.pp, world.ep)]


@pytest.mark.slow
def test_experts_are_distributed_over_replicas(tmp_path: Path) -> None:
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    message = run_ranks(tmp_path, seen, **sizes)
    assert message == [[(tp, 2), (0, 1), (2 * dp + tp, 4)] for dp in range(2) for tp in range(2)]


@pytest.mark.parametrize("index", range(12))
def test_ranks_are_numbered(index: int) -> None:
    sizes = ParallelSection(device="cpu", cpu_threads=1, tensor_parallel_size=2, pipeline_parallel_size=3)
    assert Rank.of(index, sizes).index(sizes) == index


def test_single_rank() -> None:
    x = torch.arange(4.0).view(2, 2)
    assert ALONE.share(6) == 6 and ALONE.all_reduce(x) is x and ALONE.gather(x) is x
