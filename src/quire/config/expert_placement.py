"""Placement of experts on devices, and rebalancing by load."""

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

Strategy = Literal["linear", "round_robin"]


class Placement(NamedTuple):
    """Placement of the experts of an MoE layer: `by_rank[rank][slot]` is the expert in a slot of a device. An
    expert may have replicas on several devices, at most one per device."""

    by_rank: tuple[tuple[int, ...], ...]

    @property
    def num_slots(self) -> int:
        """Return the largest number of expert slots of a device; a slot's global number is rank * num_slots +
        slot."""
        return max(map(len, self.by_rank))

    def replicas(self, num_experts: int) -> list[list[int]]:
        """Return the global slot numbers of each expert, in ascending order."""
        slots: list[list[int]] = [[] for _ in range(num_experts)]
        for rank, experts in enumerate(self.by_rank):
            for slot, expert in enumerate(experts):
                slots[expert].append(rank * self.num_slots + slot)
        return slots


def initial_placement(
    num_experts: int, num_ranks: int, strategy: Strategy = "linear", num_redundant: int = 0
) -> Placement:
    """Build the initial placement. With `linear`, a device gets consecutive experts (the first devices get
    one more if needed); with `round_robin`, every n-th expert. Redundant slots replicate the first
    experts."""
    total = num_experts + num_redundant
    assert num_ranks <= total and num_redundant <= num_experts * (num_ranks - 1)
    if strategy == "round_robin":
        owned = [range(rank, total, num_ranks) for rank in range(num_ranks)]
    else:
        per_rank, more = divmod(total, num_ranks)
        firsts = [rank * per_rank + min(rank, more) for rank in range(num_ranks + 1)]
        owned = [range(*pair) for pair in zip(firsts, firsts[1:], strict=False)]
    experts = [sorted({number % num_experts for number in numbers}) for numbers in owned]
    if any(len(unique) < len(numbers) for unique, numbers in zip(experts, owned, strict=True)):
        return balance([1] * num_experts, num_ranks, total // num_ranks)
    return Placement(tuple(map(tuple, experts)))


def balance(
    loads: Sequence[float], num_ranks: int, num_slots: int, before: Placement | None = None
) -> Placement:
    """Return a placement with greedily balanced load; `loads` is the number of tokens that each expert gets.

    The experts with the most load get replicas in the remaining slots. Then all replicas are assigned, the
    heaviest first, to the device with the least load. `before` is returned if the result is no better. An
    expert that stays on a device keeps its slot.
    """
    shares = [float(load) for load in loads]
    counts = [1] * len(loads)
    heap = [(-share, expert) for expert, share in enumerate(shares)]
    heapq.heapify(heap)
    for _ in range(num_ranks * num_slots - len(loads)):
        while counts[heap[0][1]] == num_ranks:
            heapq.heappop(heap)
        expert = heap[0][1]
        counts[expert] += 1
        heapq.heapreplace(heap, (-shares[expert] / counts[expert], expert))
    owned = _assign([share / count for share, count in zip(shares, counts, strict=True)], counts, num_ranks)
    after = Placement(tuple(tuple(sorted(experts)) for experts in owned))
    if before is None:
        return after
    if imbalance(after, loads) >= imbalance(before, loads):
        return before
    return _keep_slots(after, before)


def _assign(shares: list[float], counts: list[int], num_ranks: int) -> list[list[int]]:
    """Assign `counts[e]` replicas of each expert e to devices, equally many per device and no two on one
    device. `shares[e]` is the load of one replica. Return the experts of each device."""
    num_slots = sum(counts) // num_ranks
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    # Experts with a replica on every device come first, then the experts with the most load.
    order = sorted(range(len(shares)), key=lambda expert: (counts[expert] < num_ranks, -shares[expert]))
    for expert in order:
        free = sorted(
            (rank for rank in range(num_ranks) if len(owned[rank]) < num_slots),
            key=lambda rank: (loads[rank], rank),
        )
        for rank in free[: counts[expert]]:
            owned[rank].append(expert)
            loads[rank] += shares[expert]
        for _ in range(counts[expert] - len(free)):
            _make_room(expert, owned, num_slots)
    return owned


def _make_room(expert: int, owned: list[list[int]], num_slots: int) -> None:
    """Find a device for one more replica of `expert` if all devices with free slots already have a replica:
    on a full device, the new replica replaces another expert, which moves to a free slot."""
    target = next(rank for rank, experts in enumerate(owned) if len(experts) < num_slots)
    for experts in owned:
        if expert not in experts:
            moved = next(other for other in experts if other not in owned[target])
            experts[experts.index(moved)] = expert
            owned[target].append(moved)
            return


def _keep_slots(after: Placement, before: Placement) -> Placement:
    """Reorder the new placement so that experts that stay on a device keep their slots."""
    rows = []
    for experts, old in zip(after.by_rank, before.by_rank, strict=True):
        kept = set(experts) & set(old)
        new = iter([expert for expert in experts if expert not in kept])
        rows.append(tuple(expert if expert in kept else next(new) for expert in old))
    return Placement(tuple(rows))


def imbalance(placement: Placement, loads: Sequence[float]) -> float:
    """Return the highest load of a device divided by the mean load of all devices; replicas share the load of
    an expert equally."""
    counts = [len(places) for places in placement.replicas(len(loads))]
    by_rank = [sum(loads[expert] / counts[expert] for expert in experts) for experts in placement.by_rank]
    mean = sum(by_rank) / len(by_rank)
    return max(by_rank) / mean if mean else 1.0


class Move(NamedTuple):
    """A copy of an expert's weights from one slot to another; `source` and `target` are device ranks."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def copies_between(before: Placement, after: Placement) -> list[Move]:
    """Return the copies of expert weights from `before` to `after`, ordered by target. The source is a slot
    of the target itself if there is one, else a device that has the expert, chosen by the target's rank."""
    slots_of: dict[int, list[tuple[int, int]]] = {}
    for rank, experts in enumerate(before.by_rank):
        for slot, expert in enumerate(experts):
            slots_of.setdefault(expert, []).append((rank, slot))
    copies = []
    for rank, experts in enumerate(after.by_rank):
        for slot, expert in enumerate(experts):
            if before.by_rank[rank][slot] == expert:
                continue
            sources = slots_of[expert]
            source = next(
                (source_slot for source_slot in sources if source_slot[0] == rank),
                sources[rank % len(sources)],
            )
            copies.append(Move(*source, rank, slot))
    return copies
