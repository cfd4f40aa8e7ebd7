"""Tests that prompts of one tenant do not delay another tenant's decodes for long."""

from typing import Any

import numpy as np
import pytest
from symbolic import Engine

from quire.sched.limits import LEAST_TIMED, LONGEST_S, StepLimits
from quire.sched.prefill_limit import LEAST_TOKENS, SHORT_S, SLOWDOWN, prefill_limit
from quire.sched.step_cost import FIRST_TOKENS, Decodes, StepCost

FOUR = Decodes(4, 0)


def trained(decode_s: float, token_s: float) -> StepCost:
    """Return step costs after steps with decodes alone and with up to 2,000 additional prompt tokens."""
    cost = StepCost()
    for tokens in (100, 500, 1000, 2000) * 2:
        cost.learn(np.ones(4, np.int32), np.zeros(4, np.int32), decode_s)
        chunks, starts = np.array([1] * 4 + [tokens], np.int32), np.zeros(5, np.int32)
        cost.learn(chunks, starts, decode_s + tokens * token_s)
    return cost


@pytest.mark.parametrize(
    ("decode_s", "token_s", "expected"),
    [
        (0.030, 0.003, 10),  # 60 ms in total
        (0.005, 0.0001, 200),  # 25 ms are short enough
        (0.005, 0.00002, 1000),
        (0.030, 0.5, LEAST_TOKENS),
    ],
)
def test_prompt_tokens_per_step_are_bounded(decode_s: float, token_s: float, expected: int) -> None:
    limit = prefill_limit(trained(decode_s, token_s), FOUR)
    assert limit == pytest.approx(expected, rel=0.05, abs=1)
    if limit > LEAST_TOKENS:
        assert decode_s + limit * token_s <= 1.01 * max(SLOWDOWN * decode_s, SHORT_S)


def test_unknown_costs_allow_the_first_tokens() -> None:
    cost = StepCost()
    assert prefill_limit(cost, FOUR) == FIRST_TOKENS


def test_single_slow_step_is_ignored() -> None:
    cost = trained(0.030, 0.003)
    before = prefill_limit(cost, FOUR)
    cost.learn(np.ones(4, np.int32), np.zeros(4, np.int32), 5.0)
    cost.learn(np.array([1] * 4 + [10], np.int32), np.zeros(5, np.int32), 5.0)
    assert prefill_limit(cost, FOUR) == pytest.approx(before, abs=3)


def plans_with(prompt_tenant: int, limit: int, **limits: Any) -> list[list[int]]:
    """Return the tokens of each row in the steps of a long prompt while a request of tenant 1 decodes."""
    engine = Engine(fair=True, num_blocks=400, max_num_batched_tokens=64, **limits)
    engine.scheduler.admitter.cost.num_prompt_tokens = lambda *step: limit  # type: ignore[method-assign]
    engine.add("a", [5, 6, 7], 40, tenant=1)
    engine.step()
    num_before = len(engine.plans)
    engine.add("b", [number % 90 for number in range(200)], 2, tenant=prompt_tenant)
    for _ in range(30):
        engine.step()
    return [plan.num_tokens.tolist() for plan in engine.plans[num_before:]]


def test_prompt_is_split_while_another_tenant_decodes() -> None:
    steps = plans_with(2, 10)
    assert max(map(sum, steps)) == 11 and sum(map(sum, steps)) > 200


def test_prompt_of_a_single_tenant_is_not_limited() -> None:
    assert max(map(sum, plans_with(1, 10))) == 64


def test_prompt_tokens_are_limited_after_a_long_step_and_rise_again() -> None:
    limits = StepLimits(max_rows=8, max_tokens=2048)
    limits.record_time(2048, LONGEST_S)
    assert limits.timed_tokens is None
    limits.record_time(2048, 8 * LONGEST_S)
    assert limits.timed_tokens == 256
    limits.record_time(256, LONGEST_S)  # as long as it should be
    limits.record_time(1, 0.01)  # without many prompt tokens it tells nothing
    assert limits.timed_tokens == 256
    for expected in (512, 1024, None):
        limits.record_time(limits.timed_tokens or 0, 0.4 * LONGEST_S)
        assert limits.timed_tokens == expected
    limits.record_time(2048, 1000 * LONGEST_S)
    limits.record_time(LEAST_TIMED, 2 * LONGEST_S)
    assert limits.timed_tokens == LEAST_TIMED


@pytest.mark.parametrize("fair", [False, True])
def test_prompt_is_split_while_steps_are_long(fair: bool) -> None:
    """Catches an engine that reacts to nothing for minutes, and whose /health is 503, while it computes a
    long prompt on a slow device."""
    engine = Engine(fair=fair, num_blocks=400, max_num_batched_tokens=64)
    engine.scheduler.limits.timed_tokens = 20
    engine.add("a", [number % 90 for number in range(200)], 2, tenant=1)
    for _ in range(3):
        engine.step()
    assert [plan.num_tokens.tolist() for plan in engine.plans[:3]] == [[20], [40], [64]], (
        "the first step has 20 tokens, and each fast one allows twice as many"
    )
