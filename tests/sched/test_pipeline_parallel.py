"""Tests of pipeline stages: tokens travel with the plans, and every stage has a plan to compute."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from symbolic import Engine, SymbolicWorker, continuation

from quire.core.engine_core import EngineCore
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepPlan, StepResult
from quire.sched.kv_manager import KVManager
from quire.sched.scheduler import Scheduler


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 97 for i in range(length)]


@dataclass
class FirstStage(SymbolicWorker):
    """A stage that does not sample: it gets each token from a plan."""

    untold: dict[int, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        for row in (*plan.released, *(new.row for new in plan.admitted)):
            self.untold.pop(row, None)
        for row, token_id in plan.values.T.tolist():
            assert self.untold.pop(row) == token_id, f"row {row} is told a wrong token"
        assert not self.untold.keys() & set(plan.rows.tolist()), (
            "a row computes a token that is not yet known"
        )
        result = super().run(plan)
        self.untold |= dict(zip(plan.sampling_rows.tolist(), result.token_ids.tolist(), strict=True))
        return result


def staged(num_stages: int, **limits: Any) -> Engine:
    engine = Engine(**({"depth": num_stages, "num_stages": num_stages, "lazy": True} | limits))
    engine.use(FirstStage)
    return engine


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_row_samples_in_two_plans_in_flight(num_stages: int) -> None:
    engine = staged(num_stages, max_num_batched_tokens=8)
    check, crowded = engine.check, []

    def watched(plan: StepPlan) -> None:
        check(plan)
        flights = [flight.plan for flight in engine.scheduler.in_flight]
        crowded.append(len(flights))
        sampling = [row for flight in flights for row in flight.sampling_rows.tolist()]
        assert len(set(sampling)) == len(sampling)

    engine.check = watched  # type: ignore[method-assign]
    for i in range(6):
        engine.add(str(i), prompt(5 + 4 * i, 13 * i), count=9)
    engine.run()
    assert max(crowded) == num_stages
    for i in range(6):
        assert engine.outputs[str(i)] == continuation(prompt(5 + 4 * i, 13 * i), 9)
    engine.check_empty()


def test_prompt_chunks_are_pipelined() -> None:
    engine = staged(3, max_num_batched_tokens=8)
    engine.add("a", prompt(30), count=2)
    engine.step()
    assert [plan.total_tokens for plan in engine.plans] == [8, 8, 8]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_pipeline_with_preemption_prefix_hits_and_aborts(num_stages: int) -> None:
    engine = staged(num_stages, num_blocks=24, max_num_batched_tokens=16)
    for i in range(7):
        engine.add(str(i), prompt(12) + prompt(4, 20 * i), count=20)
    for _ in range(15):
        engine.step()
    assert engine.abort("2") and engine.abort("5")
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert sum(step.stats.prefix_hits for step in engine.steps) > 0
    for i in {*range(7)} - {2, 5}:
        assert engine.outputs[str(i)] == continuation(prompt(12) + prompt(4, 20 * i), 20)
    engine.check_empty()


def test_failed_step_keeps_other_outputs_in_pipeline() -> None:
    engine = staged(3)
    run = engine.worker.run

    def broken(plan: StepPlan) -> StepResult:
        if plan.step == 7:
            raise RuntimeError("once")
        return run(plan)

    engine.worker.run = broken  # type: ignore[method-assign]
    for i in range(6):
        engine.add(str(i), prompt(5, 20 * i), count=9)
    engine.run()
    assert all(engine.outputs[str(i)] == continuation(prompt(5, 20 * i), 9) for i in range(6))
    engine.check_empty()


class Stages:
    """A simulated executor of timed stages."""

    def __init__(self, num_stages: int, base_s: float, token_s: float) -> None:
        self.clock = 0.0
        self.free_at = [0.0] * num_stages
        self.busy = [0.0] * num_stages
        self.base_s, self.token_s = base_s, token_s
        self.draw = np.random.default_rng(0)

    def submit(self, plan: StepPlan) -> "Timed":
        ready, took = self.clock, self.base_s + self.token_s * plan.total_tokens
        for stage in range(len(self.free_at)):
            ready = self.free_at[stage] = max(ready, self.free_at[stage]) + took
            self.busy[stage] += took
        return Timed(self, plan, ready)


@dataclass
class Timed:
    stages: Stages
    plan: StepPlan
    done_at: float

    def wait(self) -> StepResult:
        self.stages.clock = max(self.stages.clock, self.done_at)
        token_ids = self.stages.draw.integers(0, 97, len(self.plan.sampling_rows), dtype=np.int32)
        return StepResult(token_ids=token_ids)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize(("longest", "token_s", "least"), [(4000, 0.0, 0.95), (60, 0.01, 0.9)])
def test_no_stage_idles_in_steady_state(num_stages: int, longest: int, token_s: float, least: float) -> None:
    """Check decodes alone, whose steps take equal times, and decodes mixed with prompts."""
    kv = KVManager(num_blocks=16384, block_size=16, max_rows=37, share_prefixes=False)
    limits = {"max_num_seqs": 37, "max_num_batched_tokens": 64, "max_model_len": 8192}
    stages = Stages(num_stages, base_s=1.0, token_s=token_s)
    scheduler = Scheduler(kv=kv, num_stages=num_stages, **limits)
    core = EngineCore(stages, scheduler, depth=num_stages)  # type: ignore[arg-type]
    draw = np.random.default_rng(1)
    for number in range(500):
        length, count = int(draw.integers(5, 40)), longest if token_s == 0 else int(draw.integers(5, longest))
        core.add(
            Request(
                id=str(number),
                tokens=draw.integers(0, 97, length).tolist(),
                params=SamplingParams(max_tokens=count, ignore_eos=True),
                prompt_len=length,
                limit=length + count,
                seed=0,
            )
        )
    for _ in range(50):
        core.step()
    began, before = stages.clock, list(stages.busy)
    for _ in range(200):
        core.step()
    assert len(scheduler.running) == 37 and len(scheduler.admitter.waiting)
    took = stages.clock - began
    assert min(after - start for after, start in zip(stages.busy, before, strict=True)) > least * took
