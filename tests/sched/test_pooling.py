"""Tests of pooling requests: they end with their prompt and return a vector."""

import numpy as np
from symbolic import Engine

from quire.data.params import SamplingParams
from quire.data.pooling import Pooled, PoolingParams
from quire.data.request import Request
from quire.data.step_plan import StepPlan, StepResult
from quire.sched.scheduler import Scheduler


def add(scheduler: Scheduler, id: str, length: int) -> None:
    scheduler.add(
        Request(
            id=id,
            tokens=[length] * length,
            params=SamplingParams(max_tokens=1),
            prompt_len=length,
            limit=length + 1,
            seed=0,
            pooling=PoolingParams(),
        )
    )


def result(plan: StepPlan) -> StepResult:
    """Return a result in which each pooled row gets its row number."""
    rows = plan.sampling_rows.tolist()
    return StepResult(
        np.empty(0, np.int32), pooled={row: Pooled.of(np.full(2, row, np.float32)) for row in rows}
    )


def test_pooling_request_ends_with_its_last_prompt_token() -> None:
    scheduler = Engine(max_num_batched_tokens=10, max_model_len=16).scheduler
    add(scheduler, "short", 4)
    add(scheduler, "full", 16)
    plan = scheduler.plan()
    assert plan is not None and plan.num_tokens.tolist() == [4, 6] and plan.admitted[0].pooling is not None
    output = scheduler.update(plan, result(plan))
    assert list(output.pooled) == ["short"] and output.request_ids == []
    assert output.finished["short"].reason == "stop"
    plan = scheduler.plan()
    assert plan is not None and plan.num_tokens.tolist() == [10]
    output = scheduler.update(plan, result(plan))
    assert output.finished["full"].reason == "stop" and output.stats.num_prompt_tokens == 16
    assert not scheduler.has_work and scheduler.kv.pool.usage == 0.0


def test_aborted_pooling_request_gets_no_vector() -> None:
    scheduler = Engine(max_num_batched_tokens=10).scheduler
    for id in ("a", "b"):
        add(scheduler, id, 3)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort(["a"])
    output = scheduler.update(plan, result(plan))
    assert list(output.pooled) == ["b"] and (output.pooled["b"].array() == plan.rows[1]).all()
    assert list(output.finished) == ["b"]


def test_failed_pooling_step_is_retried_one_by_one() -> None:
    scheduler = Engine(max_num_batched_tokens=10).scheduler
    for id in ("a", "b"):
        add(scheduler, id, 3)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.fail(plan)
    ended = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None and len(plan.rows) == 1
        ended += list(scheduler.update(plan, result(plan)).finished)
    assert sorted(ended) == ["a", "b"]
