"""Tests that prompts of one tenant do not delay another tenant's decodes for long."""

from typing import Any

import pytest
from symbolic import Engine

from quire.sched.prefill_limit import FIRST_TOKENS, LEAST_TOKENS, SHORT_S, SLOWDOWN, PrefillLimit

MOST = 2048


def trained_pace(decode_s: float, token_s: float) -> PrefillLimit:
    """Return a pace after a decode step and a step with 100 additional prompt tokens."""
    pace = PrefillLimit()
    pace.learn(4, 0, decode_s)
    pace.learn(4, 100, decode_s + 100 * token_s)
    return pace


@pytest.mark.parametrize(
    ("decode_s", "token_s", "expected"),
    [
        (0.030, 0.003, 15),  # 75 ms in total
        (0.005, 0.0001, 450),  # 50 ms are short enough
        (0.005, 0.00002, MOST),
        (0.030, 0.5, LEAST_TOKENS),
        (0.030, 0.0, MOST),
    ],
)
def test_prompt_tokens_per_step_are_bounded(decode_s: float, token_s: float, expected: int) -> None:
    limit = trained_pace(decode_s, token_s).limit(MOST)
    assert abs(limit - expected) <= 1
    if LEAST_TOKENS < limit < MOST:
        assert decode_s + limit * token_s <= max(SLOWDOWN * decode_s, SHORT_S) + 1e-9


def test_untrained_pace_uses_default_limit() -> None:
    pace = PrefillLimit()
    assert pace.limit(MOST) == FIRST_TOKENS and pace.limit(5) == 5
    pace.learn(3, 50, 1.0)  # ignored while the duration of a decode step is unknown
    assert pace.limit(MOST) == FIRST_TOKENS


def test_single_slow_step_is_ignored() -> None:
    pace = trained_pace(0.030, 0.003)
    before = pace.limit(MOST)
    pace.learn(4, 0, 5.0)
    pace.learn(4, 10, 5.0)
    assert pace.limit(MOST) == before


def plans_with(prompt_tenant: int, limit: int, **limits: Any) -> list[list[int]]:
    """Return the tokens of each row in the steps of a long prompt while a request of tenant 1 decodes."""
    engine = Engine(fair=True, num_blocks=400, max_num_batched_tokens=64, **limits)
    engine.scheduler.admitter.prefill_limit.limit = lambda max_tokens: min(limit, max_tokens)  # type: ignore[method-assign]
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
