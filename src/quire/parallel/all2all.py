"""Expert-parallel dispatch: sends tokens to experts on other devices, and combines their outputs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config.expert_placement import Placement, Strategy, initial_placement
from quire.parallel.group import Group
from quire.parallel.world import World

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that computes the local experts' weighted output [T, hidden] from x [T, hidden], local expert ids
[T, k] (below 0: an expert on another device) and weights [T, k]."""


class EPTokens(NamedTuple):
    """Numbers of tokens of a step in data-parallel engines that share experts."""

    num_real: int
    """Number of this engine's tokens, without padding."""
    room: int
    """Number of tokens to which every engine pads its own."""


class ExpertPlaces:
    """The slots of a layer's experts on all devices, as tables in device memory that are updated in place. A
    slot holds the weights of one expert, or of a replica of it."""

    def __init__(
        self, placement: Placement, num_experts: int, rank: int, width: int, device: torch.device
    ) -> None:
        self.placement, self.num_experts, self.rank = placement, num_experts, rank
        self.num_slots = placement.num_slots
        # The last entry stands for no expert: index -1 refers to it.
        self._places = torch.full((num_experts + 1, width), -1, dtype=torch.int32, device=device)
        self._counts = torch.ones(num_experts + 1, dtype=torch.int32, device=device)
        self._local = torch.full((num_experts + 1,), -1, dtype=torch.int32, device=device)
        self.set(placement)

    def set(self, placement: Placement) -> None:
        """Set for the next steps which expert is in which slot of which rank."""
        self.placement = placement
        replicas = placement.replicas(self.num_experts)
        width = self._places.shape[1]
        rows = [(slots * width)[:width] for slots in replicas]
        first, end = self.rank * self.num_slots, (self.rank + 1) * self.num_slots
        local = [next((slot - first for slot in slots if first <= slot < end), -1) for slots in replicas]
        for table, values in (
            (self._places, rows),
            (self._counts, [len(slots) for slots in replicas]),
            (self._local, local),
        ):
            table[:-1].copy_(torch.tensor(values, dtype=torch.int32))

    def of(self, ids: Tensor) -> Tensor:
        """Return the slot of each expert, counted over all devices; replicas of an expert are used in turn by
        token."""
        ids = self._clamp(ids)
        if self._places.shape[1] == 1:
            return self._places[:, 0][ids]
        replica = torch.arange(len(ids), dtype=torch.int32, device=ids.device)[:, None] % self._counts[ids]
        return self._places[ids, replica]

    def here(self, places: Tensor) -> Tensor:
        """Convert slots counted over all devices to slots of this device; -1 if the slot is on another
        device."""
        slots = places - self.rank * self.num_slots
        return torch.where((slots >= 0) & (slots < self.num_slots), slots, -1)

    def local(self, ids: Tensor) -> Tensor:
        """Convert expert ids to slots of this device; -1 if the expert is on another device."""
        return self._local[self._clamp(ids)] if self._places.shape[1] == 1 else self.here(self.of(ids))

    def _clamp(self, ids: Tensor) -> Tensor:
        """Return ids within the valid range: the ids are undefined when kernels are only compiled."""
        return ids.clamp(-1, self.num_experts - 1) if ids.is_cuda else ids


class ExpertDispatch:
    """Expert-parallel dispatch between tensor-parallel devices, which have the same tokens: no tokens are
    sent, and each device computes its own experts. The caller must sum the results over the tensor-parallel
    group."""

    is_counted = False
    """Whether layers count how many tokens each expert gets."""

    def __init__(
        self, group: Group, tp: Group, *, strategy: Strategy, num_redundant: int, num_few: int
    ) -> None:
        self.group, self.tp = group, tp
        self.strategy, self.num_redundant = strategy, num_redundant
        self.num_few = num_few
        """Largest number of tokens of a step for which `SendDispatch` gathers all tokens instead of sending
        them."""

    def place(self, num_experts: int, device: torch.device) -> ExpertPlaces:
        """Return the table of the slots in which the experts of one MoE layer are, for their initial
        placement."""
        placement = initial_placement(num_experts, self.group.size, self.strategy, self.num_redundant)
        width = 1 if not self.num_redundant else min(self.num_redundant + 1, self.group.size)
        return ExpertPlaces(placement, num_experts, self.group.rank, width, device)

    def num_bytes(self, num_tokens: int, row_bytes: int) -> int:
        """Return the most bytes that the dispatch takes in a step of `num_tokens` tokens."""
        return 0

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, places: ExpertPlaces, mix: Mix, step: EPTokens | None
    ) -> Tensor:
        """Return the experts' weighted output [T, hidden] for expert ids and weights [T, k]; `mix` computes
        the local experts. If `step` is None, there is no padding, and every device has the same number of
        tokens."""
        return mix(x, places.local(ids), weights)


class _DataParallelDispatch(ExpertDispatch):
    """Base of the expert-parallel dispatches between data-parallel engines, which have different tokens. The
    tensor-parallel ranks of an engine have the same tokens, so each of them dispatches an equal part."""

    def num_bytes(self, num_tokens: int, row_bytes: int) -> int:
        """Return the bytes of all engines' tokens and of the outputs."""
        return 2 * self.group.size // self.tp.size * num_tokens * row_bytes

    def _local_share(
        self, x: Tensor, ids: Tensor, weights: Tensor, step: EPTokens | None
    ) -> tuple[Tensor, Tensor, int]:
        """Return this rank's part of the tokens, padded to its part in the engine with the most tokens: the
        rows of x, the ids and weights in one tensor, and the index of the first token. Ids of padding are
        -1."""
        num, room = (len(x), len(x)) if step is None else step
        share = -(-room // self.tp.size)
        first = self.tp.rank * share
        routing = torch.cat((ids, weights.view(torch.int32)), 1)
        if first == 0 and share == num == len(x):
            return x, routing, 0
        count = max(min(num - first, share), 0)
        rows, padded = x.new_zeros(share, x.shape[1]), routing.new_full((share, routing.shape[1]), -1)
        rows[:count], padded[:count] = x[first : first + count], routing[first : first + count]
        return rows, padded, first

    def _restore(self, out: Tensor, like: Tensor, first: int) -> Tensor:
        """Return [len(like), hidden] with this rank's outputs `out` at row `first`, and zeros elsewhere."""
        if len(out) == len(like):
            return out
        whole = torch.zeros(len(like), out.shape[1], dtype=out.dtype, device=out.device)
        count = max(min(len(like) - first, len(out)), 0)
        whole[first : first + count] = out[:count]
        return whole


def _split_routing(routing: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = routing.chunk(2, 1)
    return ids.contiguous(), weights.contiguous().view(torch.float32)


class GatherDispatch(_DataParallelDispatch):
    """Gathers all tokens on every device, and sums the outputs of all experts. Sizes are equal on all
    devices, so that the dispatch can be captured in a CUDA graph."""

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, places: ExpertPlaces, mix: Mix, step: EPTokens | None
    ) -> Tensor:
        rows, routing, first = self._local_share(x, ids, weights, step)
        all_ids, all_weights = _split_routing(self.group.gather(routing, 0))
        out = mix(self.group.gather(rows, 0), places.local(all_ids), all_weights)
        return self._restore(self.group.reduce_scatter(out), x, first)


class SendDispatch(GatherDispatch):
    """Sends tokens only to the devices of their experts, and returns weighted outputs.

    The host must wait for the numbers of tokens. So steps of few tokens, which CUDA graphs cover, use the
    gathering of the base class.
    """

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, places: ExpertPlaces, mix: Mix, step: EPTokens | None
    ) -> Tensor:
        if (len(x) if step is None else step.room) <= self.num_few:
            return super().__call__(x, ids, weights, places, mix, step)
        rows, routing, first = self._local_share(x, ids, weights, step)
        local_ids, local_weights = _split_routing(routing)
        at, size = places.of(local_ids), self.group.size
        ranks = torch.where(at < 0, size, at // places.num_slots)
        is_sent = torch.zeros(len(rows), size + 1, dtype=torch.bool, device=x.device)
        is_sent.scatter_(1, ranks.long(), True)
        counts = is_sent[:, :size].sum(0)
        tokens = is_sent[:, :size].t().nonzero()[:, 1]
        ones = [1] * size
        sent, received = counts.tolist(), self.group.all_to_all(counts[:, None], ones, ones)[:, 0].tolist()
        routing = torch.cat((at, local_weights.view(torch.int32)), 1)[tokens]
        slots, slot_weights = _split_routing(self.group.all_to_all(routing, sent, received))
        arrived = self.group.all_to_all(rows[tokens], sent, received)
        returned = self.group.all_to_all(mix(arrived, places.here(slots), slot_weights), received, sent)
        out = torch.zeros(len(rows), returned.shape[1], dtype=torch.float32, device=x.device)
        return self._restore(out.index_add_(0, tokens, returned.float()).to(returned.dtype), x, first)


def open_dispatch(
    world: World, backend: str, *, strategy: Strategy = "linear", num_redundant: int = 0, num_few: int = 0
) -> ExpertDispatch | None:
    """Build the dispatch of a worker; None without expert parallelism. `num_few` is the largest number of
    tokens of a step for which the backend `all2all` gathers all tokens instead of sending them."""
    group, tp = world.ep, world.tp
    if group.size == 1:
        return None
    kind: type[ExpertDispatch] = SendDispatch if backend == "all2all" else GatherDispatch
    kind = ExpertDispatch if group.size == tp.size else kind
    return kind(group, tp, strategy=strategy, num_redundant=num_redundant, num_few=num_few)
