"""Fair shares: two keys and more, one of them greedy; tokens by weight, first tokens in time, order kept."""

from collections import Counter
from random import Random
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from symbolic import Engine, continuation
from test_queues import make_request

from quire.sched.fairness import FairShare
from quire.sched.queues import FairQueue

GREEDY, LIGHT = 1, 2


class Keys:
    """An engine under load of several keys, and what each of them got."""

    def __init__(self, **limits: Any) -> None:
        self.engine = Engine(fair=True, **limits)
        self.engine.check_index = lambda: None  # type: ignore[method-assign]  # slow; test_properties has it
        # Otherwise steps would depend on how fast this machine runs them; test_prompt_pace.py has it.
        self.engine.scheduler.admitter.prompt_pace.limit = lambda most: most  # type: ignore[method-assign]
        self.tenants: dict[str, int] = {}
        self.first_token_at: dict[str, int] = {}
        self.computed: list[Counter[int]] = []
        """By step: tokens by tenant."""

    def add(self, tenant: int, length: int, count: int, weight: float = 1.0) -> str:
        id = f"{tenant}-{len(self.tenants)}"
        prompt = [(31 * len(self.tenants) + 7 * at) % 97 for at in range(length)]
        self.engine.add(id, prompt, count, tenant=tenant, weight=weight)
        self.tenants[id] = tenant
        return id

    def step(self) -> None:
        engine, num_plans = self.engine, len(self.engine.plans)
        output = engine.step()
        for id in output.request_ids:
            self.first_token_at.setdefault(id, len(self.computed))
        found: Counter[int] = Counter()
        for plan in engine.plans[num_plans:]:
            # A row's tenant outlives its request by a step.
            tenants = engine.scheduler.running.tenant[plan.rows].tolist()
            for tenant, num_tokens in zip(tenants, plan.num_tokens.tolist(), strict=True):
                found[tenant] += num_tokens
        self.computed.append(found)

    def num_waiting(self, tenant: int) -> int:
        waiting = (each for each in self.engine.scheduler.requests.values() if each.row < 0)
        return sum(each.tenant == tenant for each in waiting)


def test_a_line_goes_by_what_each_tenant_has_had() -> None:
    shares = FairShare()
    line = FairQueue("fcfs", shares)
    for number in range(6):
        request = make_request(number)
        request.tenant, request.weight = (1, 1.0) if number < 4 else (2, 2.0)
        line.push(request)
    order = []
    while len(line):
        request = line.pop()
        order.append((request.tenant, request.id))
        shares.charge(np.array([request.tenant]), np.array([10]))
    # Two of the second for one of the first while both wait; among one tenant's the order of arrival.
    assert order == [(1, "0"), (2, "4"), (2, "5"), (1, "1"), (1, "2"), (1, "3")]


def test_within_a_tenant_the_policy_decides() -> None:
    line = FairQueue("priority", FairShare())
    requests = [make_request(number, priority=-number) for number in range(4)]
    for request in requests:
        line.push(request)
    assert [line.pop() for _ in range(4)] == requests[::-1]


def test_idle_time_is_no_credit() -> None:
    """Catches a key that comes late and has everything for as long as it was away."""
    shares = FairShare()
    line = FairQueue("fcfs", shares)
    for number, tenant in enumerate([1, 1, 2, 2]):
        request = make_request(number)
        request.tenant = tenant
        if number == 2:
            shares.charge(np.array([1]), np.array([10_000]))
        line.push(request)
    found = []
    while len(line):
        found.append(line.pop().tenant)
        shares.charge(np.array([found[-1]]), np.array([10]))
    assert found == [1, 2, 1, 2]
    # With nobody in the line a newcomer starts level with who has had most.
    late = make_request(9)
    late.tenant = 3
    line.push(late)
    assert shares.levels[3] == shares.levels[:3].max()


def test_long_answers_in_every_row_delay_nobody_else() -> None:
    """Catches rows that a key keeps until its answers end, and one that is never given back its own."""
    keys = Keys(max_num_seqs=4, num_blocks=400)
    for _ in range(20):
        keys.add(GREEDY, 8, 150)
    for _ in range(30):
        keys.step()
    light = keys.add(LIGHT, 5, 3)
    asked_at = len(keys.computed)
    while light not in keys.first_token_at:
        keys.step()
    assert keys.first_token_at[light] - asked_at < 12, "150 without making way"
    keys.engine.run()
    assert all(reason == "length" for reason in keys.engine.reasons.values())
    for request in keys.engine.seen:
        said = keys.engine.outputs[request.id]
        assert said == continuation(request.tokens[: request.prompt_len], len(said))
    keys.engine.check_empty()


def test_a_full_cache_makes_way_too() -> None:
    keys = Keys(max_num_seqs=64, num_blocks=60, max_num_batched_tokens=64, share=False)
    for _ in range(20):
        keys.add(GREEDY, 20, 60)
    for _ in range(20):
        keys.step()
    light = keys.add(LIGHT, 20, 3)
    asked_at = len(keys.computed)
    while light not in keys.first_token_at:
        keys.step()
    assert keys.first_token_at[light] - asked_at < 25
    keys.engine.run()
    keys.engine.check_empty()


def test_long_prompts_leave_room_for_short_ones() -> None:
    """Catches a prompt of many chunks that has every step to itself."""
    keys = Keys(num_blocks=2000, max_num_seqs=8)
    for _ in range(4):
        keys.add(GREEDY, 1500, 2)
    for _ in range(3):
        keys.step()
    light = keys.add(LIGHT, 20, 2)
    asked_at = len(keys.computed)
    while light not in keys.first_token_at:
        keys.step()
    assert keys.first_token_at[light] - asked_at <= 2, "a prompt takes 47 steps"
    keys.engine.run()
    keys.engine.check_empty()


ENOUGH = 33
"""Requests of a key that wait: more than a step can take in."""
LOADS = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 2.0, 3.0]),
        st.tuples(st.integers(1, 40), st.integers(1, 30)),
        st.tuples(st.integers(1, 40), st.integers(1, 30)),
    ),
    min_size=2,
    max_size=3,
)


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(LOADS, st.sampled_from([8, 12, 24]), st.sampled_from([1, 2]), st.booleans(), st.integers(0, 2**31))
def test_while_all_wait_tokens_are_shared_by_weight(
    loads: list[Any], max_num_seqs: int, depth: int, share: bool, seed: int
) -> None:
    """Within 10 % of each share, whatever the lengths; nobody starves and nobody overtakes its own."""
    keys = Keys(max_num_seqs=max_num_seqs, num_blocks=max_num_seqs * 20, depth=depth, share=share)
    draw, longest = Random(seed), 0
    for _ in range(400):
        for tenant, (weight, *shapes) in enumerate(loads, 1):
            for _ in range(keys.num_waiting(tenant), ENOUGH):
                length, count = (draw.randint(1, most) for most in draw.choice(shapes))
                longest = max(longest, length + count)
                keys.add(tenant, length, count, weight)
        keys.step()
    total = sum(keys.computed, Counter[int]())
    weights = {tenant: weight for tenant, (weight, *_) in enumerate(loads, 1)}
    for tenant, weight in weights.items():
        due = weight / sum(weights.values()) * total.total()
        assert abs(total[tenant] - due) <= 0.1 * due + longest, (total, weights)
    admitted = [each.request_id for plan in keys.engine.plans for each in plan.admitted]
    for tenant in weights:
        numbers = [int(id.split("-")[1]) for id in dict.fromkeys(admitted) if keys.tenants[id] == tenant]
        assert numbers == sorted(numbers) and len(numbers) > 3
    for id in list(keys.engine.scheduler.requests):
        keys.engine.abort(id)
    keys.engine.run()
    keys.engine.check_empty()
