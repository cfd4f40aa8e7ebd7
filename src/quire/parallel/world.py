"""The parallel groups of a worker, and how it joins them."""

import datetime
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from quire.config.parallel import Rank
from quire.config.sections import ParallelSection
from quire.parallel.group import ALONE, Group, OrderedGroup, TorchGroup
from quire.parallel.host_staged import StagedGroup, is_shared
from quire.parallel.symmetric_memory import with_symmetric_memory


@dataclass(frozen=True, slots=True)
class World:
    """A worker's rank and its groups; by default each group has one member."""

    rank: Rank = Rank()
    tp: Group = ALONE
    """Tensor-parallel group."""
    pp: Group = ALONE
    """Pipeline-parallel group, in the order of stages."""
    ep: Group = ALONE
    """Expert-parallel group."""


def join(
    parallel: ParallelSection,
    rank: Rank,
    init_method: str,
    device: torch.device,
    timeout_s: float,
    *,
    ordered: bool = False,
) -> World:
    """Join all other workers at a rendezvous URL (`file://`, `tcp://`), and return this worker's groups; all
    workers must call it. If `ordered`, sums between GPUs are added in the order of the ranks."""
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    shared = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    dp_size = parallel.data_parallel_size if shared else 1
    local = rank if shared else Rank(0, rank.pp, rank.tp)
    staged = is_shared(device)
    by_nccl = device.type == "cuda" and not staged
    dist.init_process_group(
        "nccl" if by_nccl else "gloo",
        init_method=init_method,
        rank=local.index(parallel),
        world_size=dp_size * pp_size * tp_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=_numbered(device) if by_nccl else None,
    )

    places = [Rank(*place) for place in itertools.product(range(dp_size), range(pp_size), range(tp_size))]
    args = places, local, parallel, StagedGroup if staged else OrderedGroup if ordered else TorchGroup
    tp = _create_group(*args, lambda place: (place.dp, place.pp))
    plain = staged or ordered or parallel.disable_custom_all_reduce
    return World(
        rank,
        tp=tp if plain else with_symmetric_memory(tp, device),
        pp=_create_group(*args, lambda place: (place.dp, place.tp)),
        ep=_create_group(*args, lambda place: (place.pp,)) if parallel.enable_expert_parallel else ALONE,
    )


def _create_group(
    places: list[Rank],
    local: Rank,
    parallel: ParallelSection,
    kind: type[TorchGroup],
    key: Callable[[Rank], tuple[int, ...]],
) -> Group:
    """Create the groups of ranks with equal keys, and return the one of this rank; all ranks must create all
    groups."""
    group: Group = ALONE
    by_key: dict[tuple[int, ...], list[int]] = {}
    for place in places:
        by_key.setdefault(key(place), []).append(place.index(parallel))
    for group_key, members in by_key.items():
        if len(members) > 1:
            made = dist.new_group(members)
            if group_key == key(local):
                group = kind(made)
    return group


def _numbered(device: torch.device) -> torch.device:
    """Return a CUDA device with an index; a device without one stands for the current GPU."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
