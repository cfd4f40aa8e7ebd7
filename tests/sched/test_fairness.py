"""Tests of fair sharing between keys: tokens by weight, time to first token, and order within a key."""

from collections import Counter
from random import Random
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from symbolic import Engine, continuation
from test_queues import make_request

from quire.sched.fairness import FairShare
from quire.sched.queues import FairQueue, FcfsQueue, PriorityQueue

GREEDY, LIGHT = 1, 2


class TenantLoad:
    """An engine under the load of several tenants, with the tokens computed for each of them."""

    def __init__(self, **limits: Any) -> None:
        self.engine = Engine(fair=True, **limits)
        self.engine.check_index = lambda: None  # type: ignore[method-assign]  # slow; test_properties has it
        # A fixed prompt limit keeps steps independent of this machine's speed; test_prefill_limit.py has
        # others.
        self.engine.scheduler.admitter.cost.num_prompt_tokens = lambda *step: 10**6  # type: ignore[method-assign]
        self.tenants: dict[str, int] = {}
        self.first_token_at: dict[str, int] = {}
        self.computed: list[Counter[int]] = []
        """Computed tokens by tenant, for each step."""

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
        computed: Counter[int] = Counter()
        for plan in engine.plans[num_plans:]:
            # A row keeps its tenant for one step after its request ends.
            tenants = engine.scheduler.running.tenant[plan.rows].tolist()
            for tenant, num_tokens in zip(tenants, plan.num_tokens.tolist(), strict=True):
                computed[tenant] += num_tokens
        self.computed.append(computed)

    def num_waiting(self, tenant: int) -> int:
        waiting = (request for request in self.engine.scheduler.requests.values() if request.row < 0)
        return sum(request.tenant == tenant for request in waiting)


def test_queue_order_follows_tokens_used_per_tenant() -> None:
    shares = FairShare()
    queue = FairQueue(FcfsQueue, shares)
    for number in range(6):
        request = make_request(number)
        request.tenant, request.weight = (1, 1.0) if number < 4 else (2, 2.0)
        queue.push(request)
    order = []
    while len(queue):
        request = queue.pop()
        order.append((request.tenant, request.id))
        shares.charge(np.array([request.tenant]), np.array([10]))
    # Two of the second tenant for one of the first while both wait; within a tenant, the order of arrival.
    assert order == [(1, "0"), (2, "4"), (2, "5"), (1, "1"), (1, "2"), (1, "3")]


def test_policy_decides_within_a_tenant() -> None:
    queue = FairQueue(PriorityQueue, FairShare())
    requests = [make_request(number, priority=-number) for number in range(4)]
    for request in requests:
        queue.push(request)
    assert [queue.pop() for _ in range(4)] == requests[::-1]


def test_idle_tenant_earns_no_credit() -> None:
    """Check that a tenant that arrives late does not monopolize the engine."""
    shares = FairShare()
    queue = FairQueue(FcfsQueue, shares)
    for number, tenant in enumerate([1, 1, 2, 2]):
        request = make_request(number)
        request.tenant = tenant
        if number == 2:
            shares.charge(np.array([1]), np.array([10_000]))
        queue.push(request)
    tenants = []
    while len(queue):
        tenants.append(queue.pop().tenant)
        shares.charge(np.array([tenants[-1]]), np.array([10]))
    assert tenants == [1, 2, 1, 2]
    # With an empty queue a new tenant starts at the level of the tenant that has used most.
    late = make_request(9)
    late.tenant = 3
    queue.push(late)
    assert shares.levels[3] == shares.levels[:3].max()


def test_long_outputs_in_all_rows_do_not_delay_other_tenants() -> None:
    """Check that rows are taken from a greedy tenant, and that its requests resume and finish."""
    keys = TenantLoad(max_num_seqs=4, num_blocks=400)
    for _ in range(20):
        keys.add(GREEDY, 8, 150)
    for _ in range(30):
        keys.step()
    light = keys.add(LIGHT, 5, 3)
    asked_at = len(keys.computed)
    while light not in keys.first_token_at:
        keys.step()
    assert keys.first_token_at[light] - asked_at < 12, "150 steps without preemption"
    keys.engine.run()
    assert all(reason == "length" for reason in keys.engine.reasons.values())
    for request in keys.engine.seen:
        output = keys.engine.outputs[request.id]
        assert output == continuation(request.tokens[: request.prompt_len], len(output))
    keys.engine.check_empty()


def test_full_cache_preempts_greedy_tenant() -> None:
    keys = TenantLoad(max_num_seqs=64, num_blocks=60, max_num_batched_tokens=64, share=False)
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


def test_long_prompts_leave_tokens_for_short_prompts() -> None:
    """Check that a prompt of many chunks does not fill every step."""
    keys = TenantLoad(num_blocks=2000, max_num_seqs=8)
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
"""Number of waiting requests per tenant: more than one step can admit."""
LOADS = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 2.0, 3.0]),
        st.tuples(st.integers(1, 40), st.integers(1, 30)),
        st.tuples(st.integers(1, 40), st.integers(1, 30)),
    ),
    min_size=2,
    max_size=3,
)


@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(LOADS, st.sampled_from([8, 12, 24]), st.sampled_from([1, 2]), st.booleans(), st.integers(0, 2**31))
def test_tokens_are_shared_by_weight_under_load(
    loads: list[Any], max_num_seqs: int, depth: int, share: bool, seed: int
) -> None:
    """Check that each tenant gets its share within 10 % and its requests are admitted in order of arrival."""
    keys = TenantLoad(max_num_seqs=max_num_seqs, num_blocks=max_num_seqs * 20, depth=depth, share=share)
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
    admitted = [admission.request_id for plan in keys.engine.plans for admission in plan.admitted]
    for tenant in weights:
        numbers = [int(id.split("-")[1]) for id in dict.fromkeys(admitted) if keys.tenants[id] == tenant]
        assert numbers == sorted(numbers) and len(numbers) > 3
    for id in list(keys.engine.scheduler.requests):
        keys.engine.abort(id)
    keys.engine.run()
    keys.engine.check_empty()
