"""Tests of the fitted step costs against synthetic steps with known costs."""

import random

import numpy as np
import pytest

from quire.sched.step_cost import FIRST_TOKENS, Decodes, StepCost

DEVICES = {
    "decodes dominate": (4e-3, 20e-6, 20e-9, 1.5e-3, 22e-6, 40e-12),
    "prompts dominate": (1e-2, 5e-3, 0.0, 0.0, 3e-3, 1e-7),
    "constant": (5e-3, 0.0, 0.0, 0.0, 0.0, 0.0),
}


def true_s(costs: tuple[float, ...], num_decodes: int, context: int, tokens: int, start: int) -> float:
    pairs = tokens * (start + tokens / 2)
    return float(np.dot((1, num_decodes, num_decodes * context, tokens > 0, tokens, pairs), costs))


def trained(costs: tuple[float, ...], *, num_steps: int = 300, outliers: float = 0.0) -> StepCost:
    """Return step costs after random steps. A share of the steps takes five times as long as its work."""
    cost, draw = StepCost(), random.Random(1)
    for _ in range(num_steps):
        num_decodes, context = draw.randint(1, 64), draw.randint(10, 4000)
        tokens, start = draw.choice([0, 0, draw.randint(2, 2000)]), draw.randint(0, 8000)
        seconds = true_s(costs, num_decodes, context, tokens, start) * (1 + 0.05 * draw.random())
        chunks = np.array([1] * num_decodes + [tokens] * (tokens > 0), np.int32)
        starts = np.array([context] * num_decodes + [start] * (tokens > 0), np.int32)
        cost.learn(chunks, starts, seconds * (5 if draw.random() < outliers else 1))
    return cost


@pytest.mark.parametrize("outliers", [0.0, 0.1])
@pytest.mark.parametrize("device", DEVICES)
def test_planned_prompt_tokens_use_the_time_and_no_more(device: str, outliers: float) -> None:
    costs = DEVICES[device]
    cost = trained(costs, outliers=outliers)
    for num_decodes, context, start in ((1, 100, 0), (32, 2000, 4000), (64, 500, 0)):
        for wanted in (100, 1000):
            limit_s = true_s(costs, num_decodes, context, wanted, start)
            tokens = cost.num_prompt_tokens(limit_s, Decodes(num_decodes, num_decodes * context, start))
            step_s = true_s(costs, num_decodes, context, tokens, start)
            assert 0.7 * limit_s <= step_s <= 1.15 * limit_s


def test_warnings_need_steps_of_decodes_alone() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.learn(np.array([500], np.int32), np.array([0], np.int32), 0.02)
    assert cost.is_known and not cost.is_reliable
    for _ in range(20):
        cost.learn(np.array([1], np.int32), np.array([100], np.int32), 0.001)
    assert cost.is_reliable


def test_unknown_costs_allow_few_prompt_tokens() -> None:
    cost = StepCost()
    assert cost.num_prompt_tokens(1.0, Decodes(4, 100)) == FIRST_TOKENS and not cost.is_known
    for _ in range(10):
        cost.learn(np.array([1, 1], np.int32), np.array([5, 5], np.int32), 0.01)
    assert not cost.is_known
    assert cost.num_prompt_tokens(1.0, Decodes(4, 100)) == FIRST_TOKENS


def test_prompt_tokens_grow_step_by_step() -> None:
    """Steps with few prompt tokens say little of the cost of steps with thousands."""
    cost = trained(DEVICES["constant"], num_steps=0)
    for tokens in [64] * 8:
        cost.learn(np.array([1], np.int32), np.array([5], np.int32), 0.005)
        cost.learn(np.array([1, tokens], np.int32), np.array([5, 0], np.int32), 0.005)
    assert cost.num_prompt_tokens(1.0, Decodes(1, 5)) == 128


def test_costs_follow_a_change() -> None:
    """A machine that becomes three times slower is noticed within the remembered steps."""
    cost, costs = trained(DEVICES["decodes dominate"]), DEVICES["decodes dominate"]
    for _ in range(130):
        for tokens in (0, 500):
            chunks = np.array([1] * 8 + [tokens] * (tokens > 0), np.int32)
            seconds = 3 * true_s(costs, 8, 100, tokens, 0)
            cost.learn(chunks, np.array([100] * 8 + [0] * (tokens > 0), np.int32), seconds)
    assert cost.step_s(Decodes(8, 800), 500) == pytest.approx(3 * true_s(costs, 8, 100, 500, 0), rel=0.15)


@pytest.mark.parametrize("num_slow", [0, 10])
@pytest.mark.parametrize("device", DEVICES)
def test_costs_are_learned_while_prompts_always_wait(device: str, num_slow: int) -> None:
    """Every step has prompt tokens beside its decodes, and the first steps may compile kernels."""
    cost, costs, draw = StepCost(), DEVICES[device], random.Random(1)
    wanted = 2000 if device != "prompts dominate" else 300
    for number in range(300):
        num_decodes, context = draw.randint(4, 24), draw.randint(200, 400)
        limit_s = true_s(costs, num_decodes, context, wanted, 0)
        tokens = min(cost.num_prompt_tokens(limit_s, Decodes(num_decodes, num_decodes * context)), 16_384)
        step_s = true_s(costs, num_decodes, context, tokens, 0)
        chunks = np.array([1] * num_decodes + [max(tokens, 8)], np.int32)
        starts = np.array([context] * num_decodes + [0], np.int32)
        cost.learn(chunks, starts, step_s * (1 + 0.05 * draw.random()) + 1.5 * (number < num_slow))
    assert 0.7 * limit_s <= step_s <= 1.2 * limit_s


def test_first_steps_are_no_reason_to_warn() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.learn(np.array([1], np.int32), np.array([9], np.int32), 1.0)
    for number in range(45):
        assert not cost.is_reliable
        cost.learn(np.array([1, 50 + number], np.int32), np.array([9, 0], np.int32), 1.0)
    assert cost.is_reliable


def test_costs_that_are_no_sum_of_terms() -> None:
    """Check steps that take longer than their terms: the attention of a few prompt tokens to many others, and
    steps above 1,024 tokens."""
    cost, draw = StepCost(), random.Random(1)

    def seconds_of(tokens: int, start: int) -> float:
        pairs_s = max(460e-12 * tokens * (start + tokens / 2), 0.36e-6 * start)
        return max(1.5e-3 + 2.4e-6 * tokens + pairs_s, 0.011 if tokens > 1024 else 0.0)

    for _ in range(600):
        tokens, start = draw.choice([200, 200, 200, draw.randint(2, 16_384)]), draw.randint(0, 32_000)
        chunks, starts = np.array([1, tokens], np.int32), np.array([9, start], np.int32)
        cost.learn(chunks, starts, seconds_of(tokens, start) * (1 + 0.05 * draw.random()))
    for start in (4_000, 16_000, 30_000):
        for tokens in (100, 200, 1_000, 4_000, 12_000):
            assert cost.step_s(Decodes(1, 9, start), tokens) == pytest.approx(
                seconds_of(tokens, start), rel=0.45
            )
            planned = cost.num_prompt_tokens(seconds_of(tokens, start), Decodes(1, 9, start))
            assert seconds_of(planned, start) <= 1.5 * seconds_of(tokens, start)
        assert cost.least_s(Decodes(1, 9, start)) == pytest.approx(seconds_of(2, start), rel=0.4)
