"""Tests of the placement of experts on devices."""

import random

import pytest

from quire.config.expert_placement import Placement, balance, copies_between, imbalance, initial_placement


def test_linear_and_round_robin_placement() -> None:
    assert initial_placement(7, 3).by_rank == ((0, 1, 2), (3, 4), (5, 6))
    assert initial_placement(7, 3, "round_robin").by_rank == ((0, 3, 6), (1, 4), (2, 5))
    assert initial_placement(4, 2, num_redundant=2).by_rank == ((0, 1, 2), (0, 1, 3))
    assert initial_placement(7, 3).replicas(7) == [[0], [1], [2], [3], [4], [6], [7]]


@pytest.mark.parametrize("seed", range(20))
def test_balanced_placement(seed: int) -> None:
    """Catches a missing expert, two copies on one device, and a higher maximum load than before."""
    chance = random.Random(seed)
    num_ranks = chance.choice([2, 3, 4, 8])
    num_experts = num_ranks * chance.randrange(1, 9)
    num_redundant = min(chance.randrange(4), num_experts - num_experts // num_ranks) * num_ranks
    num_redundant = min(num_redundant, num_experts * (num_ranks - 1))
    loads = [chance.paretovariate(1) for _ in range(num_experts)]
    strategy = chance.choice(["linear", "round_robin"])
    before = initial_placement(num_experts, num_ranks, strategy, num_redundant)  # type: ignore[arg-type]
    num_slots = (num_experts + num_redundant) // num_ranks
    after = balance(loads, num_ranks, num_slots, before)
    for placement in (before, after):
        assert {expert for experts in placement.by_rank for expert in experts} == set(range(num_experts))
        assert all(len(experts) == len(set(experts)) == num_slots for experts in placement.by_rank)
    assert imbalance(after, loads) <= imbalance(before, loads) + 1e-9
    places = [list(experts) for experts in before.by_rank]
    for source, source_slot, target, target_slot in copies_between(before, after):
        places[target][target_slot] = before.by_rank[source][source_slot]
    assert Placement(tuple(map(tuple, places))) == after


def test_overloaded_expert_is_replicated_everywhere() -> None:
    before = initial_placement(8, 4, num_redundant=4)
    loads = [0.0] * 7 + [100.0]
    after = balance(loads, 4, 3, before)
    assert all(7 in experts for experts in after.by_rank)
    assert imbalance(before, loads) == 4 and imbalance(after, loads) == pytest.approx(1)
    assert balance(loads, 4, 3, after) == after and not copies_between(after, after)
