"""World: the groups that a worker belongs to, and how it joins them."""

import datetime
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from quire.config.parallel import Rank
from quire.config.sections import ParallelSection
from quire.parallel.group import ALONE, Group, TorchGroup
from quire.parallel.staged import StagedGroup, is_shared
from quire.parallel.symmetric import with_quick_sums


@dataclass(frozen=True, slots=True)
class World:
    """A worker's place, and those it works with. Without others it is alone in each group."""

    rank: Rank = Rank()
    tp: Group = ALONE
    """Who share each layer."""
    pp: Group = ALONE
    """Who hold the other layers, in their order."""
    ep: Group = ALONE
    """Who hold the other experts of a layer."""


def join(
    parallel: ParallelSection, rank: Rank, meeting: str, device: torch.device, timeout_s: float
) -> World:
    """Meet all other workers of the world at a URL (`file://`, `tcp://`), each group in the same order."""
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    shared = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    dp_size = parallel.data_parallel_size if shared else 1
    own = rank if shared else Rank(0, rank.pp, rank.tp)
    staged = is_shared(device)
    by_nccl = device.type == "cuda" and not staged
    dist.init_process_group(
        "nccl" if by_nccl else "gloo",
        init_method=meeting,
        rank=own.index(parallel),
        world_size=dp_size * pp_size * tp_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=_numbered(device) if by_nccl else None,
    )

    places = [Rank(*place) for place in itertools.product(range(dp_size), range(pp_size), range(tp_size))]
    given = places, own, parallel, StagedGroup if staged else TorchGroup
    tp = _own_group(*given, lambda place: (place.dp, place.pp))
    return World(
        rank,
        tp=tp if staged or parallel.disable_custom_all_reduce else with_quick_sums(tp, device),
        pp=_own_group(*given, lambda place: (place.dp, place.tp)),
        ep=_own_group(*given, lambda place: (place.pp,)) if parallel.enable_expert_parallel else ALONE,
    )


def _own_group(
    places: list[Rank],
    own: Rank,
    parallel: ParallelSection,
    kind: type[TorchGroup],
    key: Callable[[Rank], tuple[int, ...]],
) -> Group:
    """Of those with the same key; everybody makes everybody's groups."""
    found: Group = ALONE
    by_key: dict[tuple[int, ...], list[int]] = {}
    for place in places:
        by_key.setdefault(key(place), []).append(place.index(parallel))
    for each, members in by_key.items():
        if len(members) > 1:
            made = dist.new_group(members)
            if each == key(own):
                found = kind(made)
    return found


def _numbered(device: torch.device) -> torch.device:
    """The one in use, if it has no number."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
