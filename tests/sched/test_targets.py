"""Tests of latency targets: which prompts go first, how many prompt tokens a step has, and the backlog."""

import logging
import time
from typing import Any

import numpy as np
import pytest
from symbolic import Engine

from quire.bench.slo import DEVICES, SimulatedRequest, make_jobs, simulate
from quire.data.latency_target import NO_TARGET, LatencyTarget
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.stats import Backlog
from quire.sched.queues import FcfsQueue, open_queue
from quire.sched.targets import Targets

MODEL = DEVICES["8B"]._replace(start_s=0.0)
"""A device whose attention of a few prompt tokens costs little, wherever they are in their prompt."""


def trained(**settings: Any) -> Targets:
    """Return targets for a machine with 10 ms for a step and 1 ms for a prompt token."""
    targets = Targets(**settings)
    for tokens in (100, 200, 400, 800) * 10:
        targets.cost.learn(np.array([1], np.int32), np.array([5], np.int32), 0.010)
        chunks, starts = np.array([1, tokens], np.int32), np.array([5, 0], np.int32)
        targets.cost.learn(chunks, starts, 0.010 + 0.001 * tokens)
    return targets


def request(id: str, length: int, ttft_s: float, **fields: Any) -> Request:
    made = Request(id=id, tokens=[1] * length, params=SamplingParams(), prompt_len=length, limit=9999, seed=0)
    made.queued_at, made.target = time.monotonic(), LatencyTarget(ttft_s)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def order(policy: str, targets: Targets, *requests: Request) -> str:
    queue = open_queue(policy, None, targets)
    for made in requests:
        queue.push(made)
    return "".join(queue.pop().id for _ in requests)


def test_prompt_with_least_slack_is_first() -> None:
    targets = trained()
    short, long, late = request("s", 100, 2.0), request("l", 1000, 2.5), request("p", 100, 9.0)
    assert order("fcfs", targets, late, short, long) == "lsp"
    urgent = request("u", 100, 9.0, priority=-1)
    assert order("priority", targets, late, short, long, urgent) == "ulsp"
    assert order("fcfs", targets, late, short, long, urgent) == "lspu"
    assert order("fcfs", targets, request("x", 10, 0.0), request("y", 9000, 0.0)) == "xy"
    resumed = request("r", 10, 9.0, has_run=True)
    assert order("fcfs", targets, short, resumed) == "rs"


def test_missed_prompt_lets_others_pass_but_not_forever() -> None:
    targets, now = trained(), time.monotonic()
    missed = request("m", 100, 1.0, queued_at=now - 1.5)
    assert order("fcfs", targets, missed, request("n", 100, 1.0)) == "nm"
    missed = request("m", 100, 1.0, queued_at=now - 3.5)
    assert targets.deadline(missed, now) == pytest.approx(now + 0.5)
    assert order("fcfs", targets, request("n", 100, 1.0), missed) == "mn"
    for age in (0.5, 2.0, 5.0, 17.0, 300.0):
        deadline = targets.deadline(request("m", 1, 1.0, queued_at=now - age), now)
        assert now <= deadline <= now + 4 * age + 1


def test_queue_notices_a_target_that_is_missed_while_waiting() -> None:
    targets = trained()
    queue = open_queue("fcfs", None, targets)
    first, second = request("a", 10, 5.0), request("b", 10, 6.0)
    queue.push(first)
    queue.push(second)
    assert queue.peek() is first
    first.queued_at -= 5.5
    assert queue.pop() is first, "pop returns what peek has returned"
    queue.push(first)
    assert queue.peek() is second and queue.pop() is second
    assert queue.pop() is first and not len(queue)


def test_without_targets_the_policy_has_its_own_queue() -> None:
    assert type(open_queue("fcfs", None, None)) is FcfsQueue


def test_waiting_prompt_gets_tokens_before_a_running_one_with_more_slack() -> None:
    engine = Engine(num_blocks=400, max_num_batched_tokens=20, targets=trained())
    engine.add("long", [number % 90 for number in range(300)], 2, target=LatencyTarget(60.0))
    engine.step()
    engine.add("short", [5] * 12, 2, target=LatencyTarget(0.5))
    engine.step()
    plan = engine.plans[-1]
    assert [admission.request_id for admission in plan.admitted] == ["short"]
    assert sorted(plan.num_tokens.tolist()) == [8, 12]


def test_prompt_is_cut_to_the_target_of_running_answers() -> None:
    targets = trained()
    targets.cost.learn = lambda *args: None  # type: ignore[method-assign]
    record_step, targets.record_step = targets.record_step, lambda *args: None  # type: ignore[method-assign]
    engine = Engine(num_blocks=400, max_num_batched_tokens=256, targets=targets)
    engine.add("a", [5, 6, 7], 40, target=LatencyTarget(0, 0.030))
    engine.step()
    engine.add("b", [number % 90 for number in range(200)], 2)
    engine.step()
    assert engine.plans[-1].num_tokens.tolist() == [1, pytest.approx(15, abs=1)]  # 0.85 * 30 ms
    engine.scheduler.running.itl_s[:] = 0.004
    engine.step()
    assert engine.plans[-1].num_tokens.tolist() == [1, 9]  # twice the time of the decode: prompts progress
    record_step(np.array([1, 9]), 0.019)  # 5.7 ms too long
    engine.step()
    assert engine.plans[-1].num_tokens.tolist() == [1]
    record_step(np.array([1]), 0.010)
    record_step(np.array([1]), 0.010)
    engine.step()
    assert engine.plans[-1].num_tokens.tolist() == [1, 10]


@pytest.mark.parametrize("name", ["0.6B", "8B"])
def test_steps_without_prompt_tokens_keep_the_target_if_a_few_prompt_tokens_exceed_it(name: str) -> None:
    """Attention of a few tokens to 200,000 before them takes several times as long as a step of decodes."""
    device = DEVICES[name]
    step_s, decode_s, _, *others = device.costs
    device = device._replace(costs=(step_s, decode_s, 0.0, *others))
    streams = [SimulatedRequest(0.0, 200, 500, 1.0) for _ in range(32)]
    simulate(device, streams, max_tokens=16384, targets=True)
    alone_s = float(np.median(np.concatenate([job.gaps for job in streams])))
    beside = [SimulatedRequest(0.0, 200, 3000, 1.0) for _ in range(32)]
    long = SimulatedRequest(0.5, 100_000 if name == "8B" else 200_000, 1, 60.0)
    simulate(device._replace(itl_s=2 * alone_s), [*beside, long], max_tokens=16384, targets=True)
    until = min(long.token_times[0], beside[0].token_times[-1])
    gaps = np.concatenate([np.diff([at for at in job.token_times if at <= until]) for job in beside])
    assert gaps.mean() <= 2 * alone_s and gaps.max() <= 10 * alone_s
    assert long.token_times[0] < 60.0


def test_slow_first_steps_do_not_make_large_steps_look_unavoidable() -> None:
    """Large steps beside decodes confirm an estimate by which small ones would take as long."""
    device = DEVICES["0.6B"]._replace(itl_s=0.005, eager_s=0.025)
    first = make_jobs(device, 100.0, 2.0, 0.05, seed=2)
    for job in first:
        job.arrives_at = 0.0
    streams = [SimulatedRequest(60.0, 200, 2000, 1.0) for _ in range(32)]
    long = SimulatedRequest(61.0, 100_000, 1, 60.0)
    simulate(device, [*first, *streams, long], max_tokens=16384, targets=True, num_slow=60)
    gaps = np.concatenate([job.gaps for job in streams])
    assert np.percentile(gaps, 99) <= 0.025 and gaps.max() <= 0.1


def test_targets_keep_more_requests_good_than_static_steps() -> None:
    rate = 7.0
    good, worst = {}, {}
    for tokens in (512, 8192, 0):
        jobs = make_jobs(MODEL, rate, 15.0, 0.05)
        simulate(MODEL, jobs, max_tokens=tokens or 16384, targets=not tokens)
        good[tokens] = sum(job.is_good(MODEL.itl_s) for job in jobs) / len(jobs)
        worst[tokens] = float(np.percentile(np.concatenate([job.gaps for job in jobs]), 99))
    assert good[0] >= 0.9 and good[0] >= 1.2 * max(good[512], good[8192])
    assert worst[0] <= MODEL.itl_s < worst[8192]


def test_unreachable_targets_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(num_blocks=600, targets=trained(), max_num_batched_tokens=64)
    with caplog.at_level(logging.WARNING):
        for id in ("a", "b"):
            engine.add(id, [number % 90 for number in range(100)], 3, target=LatencyTarget(0.05, 0.0001))
            engine.run()
    texts = [record.getMessage() for record in caplog.records if "cannot be met" in record.getMessage()]
    assert len(texts) == 2, texts
    assert any("slo_ttft_ms=50 cannot be met" in text and "100 tokens takes" in text for text in texts)
    assert any("slo_itl_ms=0.1 cannot be met" in text for text in texts)


# ---- the backlog


def test_backlog_counts_tokens_that_are_not_computed() -> None:
    targets = trained(fair=True, policy="priority")
    engine = Engine(
        num_blocks=400, max_num_batched_tokens=20, max_num_seqs=1, policy="priority", targets=targets
    )
    targets.cost.learn = lambda *args: None  # type: ignore[method-assign]
    engine.add("a", [5] * 50, 2, tenant=1)
    engine.step()
    engine.add("b", [5] * 30, 2, tenant=2, priority=3)
    backlog = targets.backlog(engine.scheduler.requests.values(), engine.scheduler.running)
    assert sorted(backlog.tokens) == [(1, 0, 30), (2, 3, 30)]
    assert backlog.rate == pytest.approx(1000, rel=0.1)
    assert targets.backlog([], engine.scheduler.running) is backlog  # counted again only after a while


def test_rate_of_prompts_counts_steps_without_prompt_tokens() -> None:
    """10 ms for a step and 1 ms for a prompt token: 9 tokens in 19 ms, and two steps of 10 ms, which make up
    for 5.7 ms more than the mean of 13.3 ms."""
    targets = trained()
    targets.cost.learn = lambda *args: None  # type: ignore[method-assign]
    engine = Engine(num_blocks=400, max_num_batched_tokens=256, targets=targets)
    engine.add("a", [5, 6, 7], 40, target=LatencyTarget(0, 0.004))
    engine.step()
    targets.record_step(np.array([1, 9]), 0.019)
    backlog = targets.backlog(engine.scheduler.requests.values(), engine.scheduler.running)
    assert backlog.rate == pytest.approx(9 / 0.036, rel=0.1)


def test_expected_wait_depends_on_key_and_priority() -> None:
    backlog = Backlog(100.0, [(1, 0, 1000), (2, 0, 100), (2, 5, 300)])
    assert backlog.wait_s(0, 9, 100) == pytest.approx(15.0)
    assert backlog.wait_s(0, 0, 100) == pytest.approx(12.0)
    assert backlog.wait_s(2, 0, 100) == pytest.approx((2 * 100 + 100) / 100)  # half of the rate is for key 1
    assert backlog.wait_s(3, 9, 100) == pytest.approx(1.0)
    assert Backlog(0.0, [(0, 0, 1000)]).wait_s(0, 0, 5) == 0.0


def test_client_may_only_ask_for_later_targets() -> None:
    target = LatencyTarget(0.5, 0.05)
    assert target.relaxed(None, None) == target == target.relaxed(10, 1)
    assert target.relaxed(2000, 80) == LatencyTarget(2.0, 0.08)
    assert NO_TARGET.relaxed(100, 100) == NO_TARGET and not NO_TARGET
