"""Tests of the selection of all-reduces through symmetric memory.

tests/gpu/test_symmetric.py tests their results.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.config.parallel import Rank
from quire.config.sections import ParallelSection
from quire.parallel import symmetric_memory as symmetric
from quire.parallel import world
from quire.parallel.group import ALONE, TorchGroup
from quire.parallel.symmetric_memory import (
    LARGEST_BYTES,
    ONE_SHOT_BYTES,
    PeerAddress,
    SymmetricGroup,
    why_no_symmetric_memory,
)

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def group() -> Iterator[TorchGroup]:
    """Create a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield TorchGroup(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the method of each all-reduce; symmetric memory is plain memory."""
    taken: list[str] = []

    def way(name: str) -> object:
        def go(*args: object) -> Tensor:
            taken.append(name)
            x = next(arg for arg in args[::-1] if isinstance(arg, Tensor))
            return x

        return go

    def empty(size: int, *, dtype: torch.dtype, device: object) -> Tensor:
        return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(symmetric, "one_shot", way("one-shot"))
    monkeypatch.setattr(symmetric, "two_shot", way("two-shot"))
    monkeypatch.setattr(TorchGroup, "all_reduce", way("nccl"))
    fake = SimpleNamespace(empty=empty, rendezvous=lambda tensor, group: taken.append("met"))
    monkeypatch.setattr(symmetric, "symm_mem", fake)
    return taken


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("size", "x", "way"),
    [
        (2, torch.zeros(1, 4096, dtype=BF16), "one-shot"),
        (2, torch.zeros(ONE_SHOT_BYTES // 4), "one-shot"),
        (2, torch.zeros(ONE_SHOT_BYTES // 4 + 4), "two-shot"),
        (8, torch.zeros(LARGEST_BYTES // 2, dtype=BF16), "two-shot"),
        (8, torch.zeros(LARGEST_BYTES // 2 + 8, dtype=BF16), "nccl"),
        (3, torch.zeros(8, 4096, dtype=BF16), "one-shot"),
        (3, torch.zeros(ONE_SHOT_BYTES // 4 + 4), "nccl"),
        (2, torch.zeros(1, 4096, dtype=torch.float16), "nccl"),
        (2, torch.zeros(4096, 2, dtype=BF16).T, "nccl"),
        (2, torch.zeros(3, dtype=BF16), "nccl"),
        (2, torch.zeros(4100, dtype=BF16)[4:], "nccl"),
        (2, torch.zeros(4104, dtype=BF16)[8:], "one-shot"),
        (2, torch.zeros(0, 4096, dtype=BF16), "nccl"),
    ],
)
def test_method_of_an_all_reduce(group: TorchGroup, ways: list[str], size: int, x: Tensor, way: str) -> None:
    """Check that no kernel gets an unsuitable tensor or is slower than NCCL."""
    made = SymmetricGroup(group.group, CUDA)
    made.size = size
    assert made.all_reduce(x).shape == x.shape and ways == ["met", way]


def test_shared_memory_is_viewed_as_the_tensor(
    group: TorchGroup, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(symmetric, "one_shot", lambda shared, x, name: seen.append(shared))
    SymmetricGroup(group.group, CUDA).all_reduce(torch.zeros(3, 136, dtype=BF16))
    assert seen[0].shape == (3, 136) and seen[0].dtype == BF16 and seen[0].storage_offset() == 0


def test_ranks_exchange_their_memory_handles() -> None:
    links = [[0, 18, 0], [18, 0, 18], [0, 18, 0]]
    assert why_no_symmetric_memory([PeerAddress("a", 0), PeerAddress("a", 1)], links) is None
    assert (
        why_no_symmetric_memory([PeerAddress("a", 0), PeerAddress("a", 1), PeerAddress("a", 2)], links)
        == "no NVLink between GPUs 0 and 2"
    )
    assert (
        why_no_symmetric_memory([PeerAddress("a", 0), PeerAddress("b", 1)], links)
        == "the GPUs are on several machines"
    )
    assert (
        why_no_symmetric_memory([PeerAddress("a", 0), PeerAddress("a", 3)], links)
        == "GPU 3 is not visible here"
    )
    assert why_no_symmetric_memory([PeerAddress("a", 0)], []) == "GPU 0 is not visible here"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process has a GPU."""
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(symmetric, "nvlinks", lambda: [[0]])


def test_all_ranks_have_symmetric_memory(group: TorchGroup, ways: list[str], gpu: None) -> None:
    assert isinstance(symmetric.with_symmetric_memory(group, CUDA), SymmetricGroup) and ways == ["met"]


def test_no_rank_uses_symmetric_memory_if_one_fails(
    group: TorchGroup, ways: list[str], gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a rank that fails to map memory does not leave the others waiting for its signals."""
    ask = symmetric._gather_objects
    monkeypatch.setattr(
        symmetric,
        "_gather_objects",
        lambda group, value: [
            *ask(group, value),
            value if isinstance(value, PeerAddress) else "broken",
        ],
    )
    assert symmetric.with_symmetric_memory(group, CUDA) is group


def test_no_symmetric_memory(
    group: TorchGroup, ways: list[str], gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensor: Tensor, group: object) -> None:
        raise RuntimeError("not supported\nby this driver")

    monkeypatch.setattr(symmetric.symm_mem, "rendezvous", refuse)
    assert symmetric.with_symmetric_memory(group, CUDA) is group


def test_no_symmetric_memory_on_a_cpu(group: TorchGroup, ways: list[str]) -> None:
    assert symmetric.with_symmetric_memory(group, torch.device("cpu")) is group
    assert symmetric.with_symmetric_memory(ALONE, CUDA) is ALONE and not ways


@pytest.mark.parametrize("disabled", [False, True])
def test_symmetric_memory_flag(disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = object()
    monkeypatch.setattr(world.dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(world, "_create_group", lambda *args: ALONE)
    monkeypatch.setattr(world, "with_symmetric_memory", lambda group, device: quick)
    parallel = ParallelSection(device="cuda", cpu_threads=1, disable_custom_all_reduce=disabled)
    joined = world.join(parallel, Rank(), "file:///nowhere", CUDA, 1.0)
    assert joined.tp is (ALONE if disabled else quick)
