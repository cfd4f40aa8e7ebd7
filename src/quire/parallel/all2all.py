"""Dispatch: how tokens reach the experts of other devices, and how what these made of them comes back."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config.expert_placement import Placement, Strategy, initial_placement
from quire.parallel.group import ALONE, Group
from quire.parallel.world import World

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What the experts of this device make of x [T, hidden], given ids [T, k] among them (below 0: elsewhere) and
weights [T, k]: [T, hidden]."""


class ExpertPlaces:
    """Where the experts of a layer are, as tables on the device. They change in place."""

    def __init__(
        self, placement: Placement, num_experts: int, rank: int, width: int, device: torch.device
    ) -> None:
        self.placement, self.num_experts, self.rank = placement, num_experts, rank
        self.num_slots = placement.num_slots
        # Behind the last expert stands none: that is where -1 points.
        self._places = torch.full((num_experts + 1, width), -1, dtype=torch.int32, device=device)
        self._counts = torch.ones(num_experts + 1, dtype=torch.int32, device=device)
        self._local = torch.full((num_experts + 1,), -1, dtype=torch.int32, device=device)
        self.set(placement)

    def set(self, placement: Placement) -> None:
        """From the next step on."""
        self.placement = placement
        replicas = placement.replicas(self.num_experts)
        width = self._places.shape[1]
        rows = [(own * width)[:width] for own in replicas]
        first, end = self.rank * self.num_slots, (self.rank + 1) * self.num_slots
        local = [next((place - first for place in own if first <= place < end), -1) for own in replicas]
        for table, values in (
            (self._places, rows),
            (self._counts, [len(own) for own in replicas]),
            (self._local, local),
        ):
            table[:-1].copy_(torch.tensor(values, dtype=torch.int32))

    def of(self, ids: Tensor) -> Tensor:
        """The number of a place for each expert; those with several take turns by token."""
        ids = self._known(ids)
        if self._places.shape[1] == 1:
            return self._places[:, 0][ids]
        turn = torch.arange(len(ids), dtype=torch.int32, device=ids.device)[:, None] % self._counts[ids]
        return self._places[ids, turn]

    def here(self, places: Tensor) -> Tensor:
        """Numbers of places -> those of this device's experts; -1: elsewhere."""
        own = places - self.rank * self.num_slots
        return torch.where((own >= 0) & (own < self.num_slots), own, -1)

    def local(self, ids: Tensor) -> Tensor:
        """Both at once."""
        return self._local[self._known(ids)] if self._places.shape[1] == 1 else self.here(self.of(ids))

    def _known(self, ids: Tensor) -> Tensor:
        """Where kernels are only compiled nobody has written the ids, and an index must still be one."""
        return ids.clamp(-1, self.num_experts - 1) if ids.is_cuda else ids


class ExpertDispatch:
    """Of devices that have all tokens already: each takes those for its own experts.

    What a call returns is to be summed over the group that shares each layer (tp).
    """

    is_counted = False
    """Whether layers count how many tokens each expert gets."""

    def __init__(self, group: Group, *, strategy: Strategy = "linear", num_redundant: int = 0) -> None:
        self.group = group
        self.strategy, self.num_redundant = strategy, num_redundant

    def place(self, num_experts: int, device: torch.device) -> ExpertPlaces:
        """The experts of one more layer."""
        placement = initial_placement(num_experts, self.group.size, self.strategy, self.num_redundant)
        width = 1 if not self.num_redundant else min(self.num_redundant + 1, self.group.size)
        return ExpertPlaces(placement, num_experts, self.group.rank, width, device)

    def plan(self, num_tokens: int | None = None, room: int | None = None) -> None:
        """Called before each step: how many tokens are real, and for how many every device makes room.
        Without: all are, and every device has as many."""

    def num_bytes(self, num_tokens: int, row_bytes: int) -> int:
        """What a step of so many tokens takes here, at most."""
        return 0

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, places: ExpertPlaces, mix: Mix) -> Tensor:
        return mix(x, places.local(ids), weights)


class _Apart(ExpertDispatch):
    """Of engines with tokens of their own. Devices that share layers, and so have the same tokens, dispatch a
    share of them each."""

    def __init__(
        self, group: Group, tp: Group = ALONE, *, strategy: Strategy = "linear", num_redundant: int = 0
    ) -> None:
        super().__init__(group, strategy=strategy, num_redundant=num_redundant)
        self.tp = tp
        self._num_tokens: int | None = None
        self._room: int | None = None

    def plan(self, num_tokens: int | None = None, room: int | None = None) -> None:
        self._num_tokens, self._room = num_tokens, room

    def num_bytes(self, num_tokens: int, row_bytes: int) -> int:
        """Everybody's tokens, and what comes of them."""
        return 2 * self.group.size // self.tp.size * num_tokens * row_bytes

    def _own(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, int]:
        """This device's share of the tokens, with room for its share of the most that any engine has: rows of
        x; ids and weights in one; the first token. Where there is no real token, ids are -1."""
        num = len(x) if self._num_tokens is None else self._num_tokens
        share = -(-(self._room or len(x)) // self.tp.size)
        first = self.tp.rank * share
        about = torch.cat((ids, weights.view(torch.int32)), 1)
        if first == 0 and share == num == len(x):
            return x, about, 0
        count = max(min(num - first, share), 0)
        rows, own = x.new_zeros(share, x.shape[1]), about.new_full((share, about.shape[1]), -1)
        rows[:count], own[:count] = x[first : first + count], about[first : first + count]
        return rows, own, first

    def _put(self, out: Tensor, like: Tensor, first: int) -> Tensor:
        """What came back, at its place among all tokens."""
        if len(out) == len(like):
            return out
        whole = torch.zeros(len(like), out.shape[1], dtype=out.dtype, device=out.device)
        count = max(min(len(like) - first, len(out)), 0)
        whole[first : first + count] = out[:count]
        return whole


def _apart(about: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = about.chunk(2, 1)
    return ids.contiguous(), weights.contiguous().view(torch.float32)


class GatherDispatch(_Apart):
    """Everybody gets all tokens, and adds up what its experts made of them with the others'. Sizes are the
    same on all devices, so that it can be captured."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, places: ExpertPlaces, mix: Mix) -> Tensor:
        rows, about, first = self._own(x, ids, weights)
        all_ids, all_weights = _apart(self.group.gather(about, 0))
        out = mix(self.group.gather(rows, 0), places.local(all_ids), all_weights)
        return self._put(self.group.reduce_scatter(out), x, first)


class SendDispatch(GatherDispatch):
    """Tokens go only to the devices that have one of their experts, and come back weighed.

    How many go where is known on the host alone, which must wait for it: steps of few tokens, which are
    captured on a GPU, are gathered.
    """

    def __init__(
        self,
        group: Group,
        tp: Group = ALONE,
        *,
        strategy: Strategy = "linear",
        num_redundant: int = 0,
        num_few: int = 0,
    ) -> None:
        super().__init__(group, tp, strategy=strategy, num_redundant=num_redundant)
        self.num_few = num_few
        """Tokens of a step that is gathered, at most."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, places: ExpertPlaces, mix: Mix) -> Tensor:
        if (self._room or len(x)) <= self.num_few:
            return super().__call__(x, ids, weights, places, mix)
        rows, about, first = self._own(x, ids, weights)
        own_ids, own_weights = _apart(about)
        at, size = places.of(own_ids), self.group.size
        ranks = torch.where(at < 0, size, at // places.num_slots)
        wanted = torch.zeros(len(rows), size + 1, dtype=torch.bool, device=x.device)
        wanted.scatter_(1, ranks.long(), True)
        counts = wanted[:, :size].sum(0)
        tokens = wanted[:, :size].t().nonzero()[:, 1]
        once = [1] * size
        sent, received = counts.tolist(), self.group.all_to_all(counts[:, None], once, once)[:, 0].tolist()
        about = torch.cat((at, own_weights.view(torch.int32)), 1)[tokens]
        got_at, got_weights = _apart(self.group.all_to_all(about, sent, received))
        got = self.group.all_to_all(rows[tokens], sent, received)
        made = self.group.all_to_all(mix(got, places.here(got_at), got_weights), received, sent)
        out = torch.zeros(len(rows), made.shape[1], dtype=torch.float32, device=x.device)
        return self._put(out.index_add_(0, tokens, made.float()).to(made.dtype), x, first)


def open_dispatch(
    world: World,
    backend: str,
    *,
    strategy: Strategy = "linear",
    num_redundant: int = 0,
    num_few: int = 0,
) -> ExpertDispatch | None:
    """For a worker of this world; None where experts are not spread."""
    group, tp = world.ep, world.tp
    if group.size == 1:
        return None
    if group.size == tp.size:
        return ExpertDispatch(group, strategy=strategy, num_redundant=num_redundant)
    if backend == "all2all":
        return SendDispatch(group, tp, strategy=strategy, num_redundant=num_redundant, num_few=num_few)
    return GatherDispatch(group, tp, strategy=strategy, num_redundant=num_redundant)
