"""Tests of steps in flight."""

from typing import Any

import pytest
from symbolic import Engine, continuation

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepPlan, StepResult


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 97 for i in range(length)]


def overlapped(**limits: Any) -> Engine:
    return Engine(**({"depth": 2, "lazy": True} | limits))


def test_next_step_is_submitted_before_the_last_is_waited_for() -> None:
    engine = overlapped()
    engine.add("a", prompt(5), count=6)
    engine.step()
    assert [len(engine.plans), len(engine.device.line), len(engine.steps)] == [2, 1, 1]
    engine.step()
    assert [len(engine.plans), len(engine.device.line), len(engine.steps)] == [3, 1, 2]


def test_depth_one_waits_for_each_step() -> None:
    engine = Engine(depth=1, lazy=True)
    engine.add("a", prompt(5), count=6)
    engine.step()
    assert [len(engine.plans), len(engine.device.line)] == [1, 0]


def test_request_that_ends_by_length_costs_no_extra_step() -> None:
    engine = overlapped()
    engine.add("a", prompt(5), count=6)
    engine.run()
    assert [plan.total_tokens for plan in engine.plans] == [5, 1, 1, 1, 1, 1]


def test_end_of_sequence_costs_one_extra_step() -> None:
    output = continuation(prompt(5), 6)
    engine = overlapped()
    engine.add("a", prompt(5), count=6, eos_id=output[2])
    while "a" not in engine.reasons:
        engine.step()
    assert engine.core.has_work and not engine.scheduler.has_work
    assert engine.step().request_ids == []
    assert not engine.core.has_work
    assert engine.outputs["a"] == output[: output.index(output[2]) + 1]
    assert len(engine.plans) == output.index(output[2]) + 2


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words_token_ids": [[3], [4, 5]]},
    ],
    ids=lambda request: next(iter(request)),
)
def test_row_that_needs_its_token_runs_every_second_step(fields: dict[str, Any]) -> None:
    """Check parameters for which the sampler needs a token that the host does not have yet."""
    engine = overlapped(share=False)
    params = SamplingParams(max_tokens=5)
    for name, value in fields.items():
        setattr(params, name, value)
    engine.add("slow", prompt(5), count=5, params=params)
    engine.add("fast", prompt(5, 40), count=5)
    engine.run()
    assert [len(plan.rows) for plan in engine.plans] == [2, 1, 2, 1, 2, 1, 1]
    assert engine.outputs["slow"] == continuation(prompt(5), 5)


def test_single_banned_token_needs_no_token_value() -> None:
    engine = overlapped()
    params = SamplingParams(max_tokens=5)
    params.bad_words_token_ids = [[3], [4]]
    engine.add("a", prompt(5), count=5, params=params)
    engine.step()
    assert len(engine.plans) == 2


def test_request_that_arrives_during_a_step_joins_the_next_plan() -> None:
    engine = overlapped()
    engine.add("a", prompt(5), count=8)
    engine.step()
    engine.add("b", prompt(6, 30), count=2)
    engine.step()
    assert [new.request_id for new in engine.plans[2].admitted] == ["b"]
    assert "b" not in engine.steps[1].admitted
    assert "b" in engine.step().admitted


def test_row_freed_by_abort_is_reused_while_its_last_step_runs() -> None:
    """Check that the aborted request's token does not reach the request that has its row now."""
    engine = overlapped(max_num_seqs=1)
    engine.add("a", prompt(5), count=8)
    engine.step()
    assert engine.abort("a")
    engine.add("b", prompt(6, 30), count=3)
    assert engine.step().request_ids == []
    engine.run()
    assert engine.outputs["b"] == continuation(prompt(6, 30), 3)
    assert len(engine.outputs["a"]) == 1


def test_aborted_id_can_be_reused_immediately() -> None:
    """Check that tokens and timings in flight are not attributed to the new request with the same id."""
    engine = overlapped(max_num_seqs=2)
    engine.add("x", prompt(5), count=8)
    engine.step()
    assert engine.abort("x")
    engine.add("y", prompt(9, 50), count=1)
    engine.step()
    assert engine.abort("y")
    del engine.reasons["y"]
    engine.add("y", prompt(6, 30), count=3)
    engine.run()
    assert engine.outputs["y"] == continuation(prompt(6, 30), 3)
    (run,) = [step.admitted["y"] for step in engine.steps if "y" in step.admitted]
    assert run.queued_at == engine.seen[-1].queued_at


def test_preemption_waits_for_tokens_in_flight() -> None:
    """Check that no token of a preempted request is in flight."""
    engine = overlapped(num_blocks=9)
    for i in range(4):
        engine.add(str(i), prompt(8, 20 * i), count=20)
    preempt = engine.scheduler._preempt

    def watched(row: int) -> Request:
        assert not engine.scheduler.in_flight
        return preempt(row)

    engine.scheduler._preempt = watched  # type: ignore[method-assign]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert all(engine.outputs[str(i)] == continuation(prompt(8, 20 * i), 20) for i in range(4))


def test_generated_blocks_are_cached_once_their_tokens_are_known() -> None:
    engine = overlapped()
    engine.add("a", prompt(6), count=10)
    engine.run()
    engine.add("b", prompt(6) + engine.outputs["a"], count=1)
    assert {id: run.num_cached for id, run in engine.step().admitted.items()} == {"b": 12}


def test_generated_blocks_of_a_running_request_are_shared() -> None:
    engine = overlapped()
    engine.add("a", prompt(6), count=30)
    for _ in range(12):
        engine.step()
    engine.add("b", prompt(6) + engine.outputs["a"], count=2)
    engine.step()
    assert engine.step().admitted["b"].num_cached == 16
    engine.run()
    assert engine.outputs["b"] == continuation(prompt(6), 30)[12:14]


def fail_once(engine: Engine, step: int) -> None:
    """Make the step with this number fail before it writes anything."""
    run = engine.worker.run

    def broken(plan: StepPlan) -> StepResult:
        if plan.step == step:
            raise RuntimeError("once")
        return run(plan)

    engine.worker.run = broken  # type: ignore[method-assign]


def test_block_indexed_during_its_step_is_removed_if_the_step_fails() -> None:
    """Check a block that entered the index after the last plan was made, so that no plan lists it."""
    engine = overlapped()
    engine.add("a", prompt(6), count=3)
    fail_once(engine, 3)
    engine.run()
    assert engine.reasons == {"a": "error"} and len(engine.plans) == 3
    engine.check_empty()


def test_trial_runs_one_step_at_a_time() -> None:
    """Check that a suspect cannot fail in the step behind the one that clears it."""
    engine = overlapped()
    for i in range(3):
        engine.add(str(i), prompt(5, 20 * i), count=5)
    fail_once(engine, 2)
    engine.step()
    engine.step()
    assert engine.scheduler.fault_isolation
    while engine.scheduler.fault_isolation:
        engine.step()
        assert not engine.scheduler.in_flight
        assert len(engine.plans[-1].rows) == 1
    engine.run()
    assert all(engine.outputs[str(i)] == continuation(prompt(5, 20 * i), 5) for i in range(3))


def test_survivor_of_a_failed_step_is_retried() -> None:
    """Check that a request does not end with an error because another request of the step was aborted."""
    engine = overlapped()
    engine.add("good", prompt(5), count=4)
    engine.add("bad", prompt(5, 40), count=4)
    fail_once(engine, 2)
    engine.step()
    engine.abort("bad")
    engine.run()
    assert engine.reasons == {"bad": "abort", "good": "length"}
    assert engine.outputs["good"] == continuation(prompt(5), 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_step_without_work_returns_nothing(depth: int) -> None:
    engine = overlapped(depth=depth)
    assert engine.step().request_ids == [] and engine.plans == []


def test_prefix_cache_can_be_reset_after_the_last_request() -> None:
    output = continuation(prompt(18), 6)
    engine = overlapped()
    engine.add("a", prompt(18), count=6, eos_id=output[2])
    engine.step()
    assert not engine.core.reset_prefix_cache()
    while "a" not in engine.reasons:
        engine.step()
    assert engine.core.has_work and engine.core.reset_prefix_cache()
    engine.add("b", prompt(18), count=6)
    engine.step()
    assert engine.step().admitted["b"].num_cached == 0
    engine.run()
    assert engine.outputs["b"] == output
