"""Tests of the step queue: results in order, failures in their turn, and an empty queue after them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from quire.core.step_queue import StepQueue
from quire.data.step_plan import Masks, StepPlan, StepResult
from quire.errors import EngineDead


def plan(step: int) -> StepPlan:
    none = np.empty(0, np.int32)
    return StepPlan(step, [], [], none, none, none, none, np.empty(0, np.bool_))


@dataclass
class Step:
    outcome: Any
    waited: bool = False

    def ready(self, timeout_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        self.waited = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return StepResult(token_ids=np.array([self.outcome], np.int32))


@dataclass
class Scripted:
    """An executor with scripted outcomes; plans in `refused` fail at submission."""

    outcomes: dict[int, Any] = field(default_factory=dict)
    refused: dict[int, Exception] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)

    def start(self) -> Any:
        raise AssertionError("never called")

    def submit(self, plan: StepPlan) -> Step:
        if plan.step in self.refused:
            raise self.refused[plan.step]
        return self.steps.setdefault(plan.step, Step(self.outcomes.get(plan.step, plan.step)))


def filled(executor: Scripted, num_steps: int = 3) -> StepQueue:
    pipeline = StepQueue(executor, depth=num_steps)
    for step in range(num_steps):
        assert pipeline.has_room()
        pipeline.submit(plan(step))
    return pipeline


def test_results_come_in_submission_order_and_free_places() -> None:
    pipeline = filled(Scripted())
    assert not pipeline.has_room()
    for step in range(3):
        done, result = pipeline.next()
        assert result is not None and (done.step, result.token_ids.tolist()) == (step, [step])
        assert pipeline.has_room() and len(pipeline) == 2 - step


def test_failed_step_discards_later_ones_but_waits_for_them() -> None:
    executor = Scripted({1: ValueError("one"), 2: ValueError("two")})
    pipeline = filled(executor, 4)
    assert pipeline.next()[1] is not None
    failed, result = pipeline.next()
    assert failed.step == 1 and result is None and len(pipeline) == 0
    assert all(step.waited for step in executor.steps.values())


def test_refused_step_is_the_last_and_fails_in_its_turn() -> None:
    pipeline = StepQueue(Scripted(refused={1: ValueError("no")}), depth=3)
    pipeline.submit(plan(0))
    pipeline.submit(plan(1))
    assert not pipeline.has_room()
    assert pipeline.next()[1] is not None and not pipeline.has_room()
    failed, result = pipeline.next()
    assert failed.step == 1 and result is None and pipeline.has_room()


@pytest.mark.parametrize(
    "executor",
    [
        Scripted({0: EngineDead("the device")}),
        Scripted({0: ValueError("a step"), 1: EngineDead("the device")}),
    ],
    ids=["first", "behind a failure"],
)
def test_dead_engine_is_not_a_failed_step(executor: Scripted) -> None:
    pipeline = filled(executor)
    with pytest.raises(EngineDead):
        pipeline.next()


def test_engine_that_dies_at_submission_raises_at_once() -> None:
    pipeline = StepQueue(Scripted(refused={0: EngineDead("the device")}), depth=2)
    with pytest.raises(EngineDead):
        pipeline.submit(plan(0))


def test_nothing_is_waited_for_after_clear() -> None:
    executor = Scripted()
    pipeline = filled(executor)
    pipeline.clear()
    assert len(pipeline) == 0 and pipeline.has_room()
    assert not any(step.waited for step in executor.steps.values())


def test_dead_workers_before_sampling_are_closed() -> None:
    """Check that the error does not keep the executor open or requests in memory."""

    class Dead(Scripted):
        closed = False

        def sample_tokens(self, masks: Masks) -> None:
            raise EngineDead("the device")

        def close(self) -> None:
            self.closed = True

    executor = Dead()
    for leave in ("clear", "close"):
        pipeline = StepQueue(executor, depth=2)
        constrained = plan(0)
        constrained.constrained = np.array([0], np.int32)
        pipeline.submit(constrained)
        assert pipeline.is_unsampled
        getattr(pipeline, leave)()
        assert len(pipeline) == 0 and not pipeline.is_unsampled
    assert executor.closed
