"""Placement: which device has which experts of a layer, and a better one where some are asked more often."""

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

Strategy = Literal["linear", "round_robin"]


class Placement(NamedTuple):
    """The experts of a layer by device, each in the order of its places there. An expert may be on more than
    one device, and is on one at most once."""

    by_rank: tuple[tuple[int, ...], ...]

    @property
    def num_slots(self) -> int:
        """Places of the device with the most: a place is numbered rank * num_slots + its number there."""
        return max(map(len, self.by_rank))

    def replicas(self, num_experts: int) -> list[list[int]]:
        """Of each expert the numbers of its places, in rising order."""
        found: list[list[int]] = [[] for _ in range(num_experts)]
        for rank, experts in enumerate(self.by_rank):
            for slot, expert in enumerate(experts):
                found[expert].append(rank * self.num_slots + slot)
        return found


def placed(
    num_experts: int, num_ranks: int, strategy: Strategy = "linear", num_redundant: int = 0
) -> Placement:
    """The first placement: neighbours (one more on the first devices where it does not divide), or every
    n-th; the redundant ones are the first once more."""
    total = num_experts + num_redundant
    assert num_ranks <= total and num_redundant <= num_experts * (num_ranks - 1)
    if strategy == "round_robin":
        owned = [range(rank, total, num_ranks) for rank in range(num_ranks)]
    else:
        each, more = divmod(total, num_ranks)
        firsts = [rank * each + min(rank, more) for rank in range(num_ranks + 1)]
        owned = [range(*pair) for pair in zip(firsts, firsts[1:], strict=False)]
    experts = [sorted({number % num_experts for number in numbers}) for numbers in owned]
    if any(len(own) < len(numbers) for own, numbers in zip(experts, owned, strict=True)):
        return balanced([1] * num_experts, num_ranks, total // num_ranks)
    return Placement(tuple(map(tuple, experts)))


def balanced(
    loads: Sequence[float], num_ranks: int, num_slots: int, before: Placement | None = None
) -> Placement:
    """As even as a greedy choice gets it: the heaviest experts get the places that are left over, then all
    are dealt, the heaviest first, to the device with the least load. `before` stays if this is no better, and
    an expert that stays on a device keeps its place there."""
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
    owned = _dealt([share / count for share, count in zip(shares, counts, strict=True)], counts, num_ranks)
    made = Placement(tuple(tuple(sorted(own)) for own in owned))
    if before is None:
        return made
    if imbalance(made, loads) >= imbalance(before, loads):
        return before
    return _settled(made, before)


def _dealt(shares: list[float], counts: list[int], num_ranks: int) -> list[list[int]]:
    """So many copies of each expert, no two on one device, as many on each."""
    num_slots = sum(counts) // num_ranks
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    # Those with the most copies first where they must go everywhere; then the heaviest.
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
            _squeeze(expert, owned, num_slots)
    return owned


def _squeeze(expert: int, owned: list[list[int]], num_slots: int) -> None:
    """One more copy than there are devices with room: another expert moves from a full device without it."""
    target = next(rank for rank, own in enumerate(owned) if len(own) < num_slots)
    for own in owned:
        if expert not in own:
            moved = next(other for other in own if other not in owned[target])
            own[own.index(moved)] = expert
            owned[target].append(moved)
            return


def _settled(made: Placement, before: Placement) -> Placement:
    """The same experts on the same devices, at the places that they had."""
    rows = []
    for own, had in zip(made.by_rank, before.by_rank, strict=True):
        kept = set(own) & set(had)
        new = iter([expert for expert in own if expert not in kept])
        rows.append(tuple(expert if expert in kept else next(new) for expert in had))
    return Placement(tuple(rows))


def imbalance(placement: Placement, loads: Sequence[float]) -> float:
    """The load of the busiest device over the mean, if the copies of an expert share its load."""
    counts = [len(places) for places in placement.replicas(len(loads))]
    by_rank = [sum(loads[expert] / counts[expert] for expert in own) for own in placement.by_rank]
    mean = sum(by_rank) / len(by_rank)
    return max(by_rank) / mean if mean else 1.0


class Move(NamedTuple):
    """An expert's weights from one place to another."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def moves(before: Placement, after: Placement) -> list[Move]:
    """What must be copied, by target; each comes from a device that had it, another one where there are more,
    and from the target itself where it can."""
    homes: dict[int, list[tuple[int, int]]] = {}
    for rank, own in enumerate(before.by_rank):
        for slot, expert in enumerate(own):
            homes.setdefault(expert, []).append((rank, slot))
    found = []
    for rank, own in enumerate(after.by_rank):
        for slot, expert in enumerate(own):
            if before.by_rank[rank][slot] == expert:
                continue
            known = homes[expert]
            source = next((home for home in known if home[0] == rank), known[rank % len(known)])
            found.append(Move(*source, rank, slot))
    return found
