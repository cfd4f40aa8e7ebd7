"""Tests of request timings: shares of step time, and time spent preempted."""

import pytest
from symbolic import Engine

from quire.data.step_plan import StepOutput, StepPlan, StepResult, split_by_owner


@pytest.mark.parametrize("depth", [1, 2])
def test_timed_request_gets_its_share_of_every_step(depth: int) -> None:
    """Check that prompt chunks without a token count too, and that untimed requests get no share."""
    engine = Engine(max_num_batched_tokens=12, depth=depth)
    engine.add("a", list(range(30)), count=3, timed=True)
    engine.add("b", list(range(50, 53)), count=5, timed=True)
    engine.add("c", list(range(60, 63)), count=9)
    engine.run()
    for place, step in enumerate(engine.steps):
        assert "c" not in step.shares and step.shares.keys() >= {*step.request_ids} - {"c"}
        assert all(seconds > 0 for seconds in step.shares.values())
        if place == 0:
            assert step.shares.keys() == {"a"} and not step.request_ids
    together = [step.shares for step in engine.steps if step.shares.keys() == {"a", "b"}]
    for plan, step in zip(engine.plans, engine.steps, strict=False):
        if plan.is_decode and step.shares in together:
            assert step.shares["a"] == pytest.approx(step.shares["b"])
    assert together and not engine.steps[-1].shares


def test_overlapping_steps_are_not_counted_twice() -> None:
    engine = Engine(depth=2)
    engine.add("a", [1, 2, 3], count=20, timed=True)
    engine.run()
    total = sum(step.shares.get("a", 0.0) for step in engine.steps)
    began = min(run.scheduled_at for step in engine.steps for run in step.admitted.values())
    assert 0 < total <= engine.steps[-1].at - began + 1e-6


def test_duration_that_the_device_measured_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a request that has ended meanwhile, too, whose tokens are removed from the result."""
    engine = Engine(depth=2)
    update = engine.scheduler.update

    def measured(plan: StepPlan, result: StepResult) -> StepOutput:
        result.device_s = 2.5
        return update(plan, result)

    monkeypatch.setattr(engine.scheduler, "update", measured)
    engine.add("a", [1, 2, 3], count=20, timed=True)
    engine.add("b", [4, 5, 6], count=20)
    for _ in range(3):
        engine.step()
    engine.abort("b")
    engine.step()
    assert [step.shares["a"] for step in engine.steps] == [1.25, 1.25, 1.25, 1.25]


def test_preempted_request_reports_its_time_away() -> None:
    engine = Engine(num_blocks=12, share=False)
    for name in "abcd":
        engine.add(name, list(range(9)), count=12)
    engine.run()
    away = [(id, seconds) for step in engine.steps for id, seconds in step.resumed.items()]
    counts = {request.id: request.num_preemptions for request in engine.seen}
    assert sum(counts.values()) == len(away) > 0
    assert all(seconds > 0 and counts[id] for id, seconds in away)


def test_each_api_process_gets_its_own_timings() -> None:
    """Check a step without sampled tokens too."""
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", list(range(30)), timed=True)
    parts = split_by_owner(engine.step(), {"a": b"x", "b": b"y"})
    assert parts.keys() == {b"x"}
    second = engine.step()
    assert not second.request_ids and not second.admitted
    assert split_by_owner(second, {"a": b"x", "b": b"y"})[b"x"].shares.keys() == {"a"}


def test_step_with_prompt_logprobs_alone_belongs_to_its_client() -> None:
    """Catches a core that ends at a chunk in the middle of the only prompt: it has logprobs and no token."""
    step = StepOutput([], [], prompt_logprobs={"a": []})
    assert split_by_owner(step, {"a": b"x", "b": b"y"}) == {b"x": step}
    both = StepOutput([], [], prompt_logprobs={"a": []}, drafted={"b": 1})
    parts = split_by_owner(both, {"a": b"x", "b": b"y"})
    assert parts[b"x"].prompt_logprobs.keys() == {"a"} and parts[b"y"].drafted.keys() == {"b"}


def test_tokens_of_a_step_with_drafts_are_split_by_owner() -> None:
    step = StepOutput(["a", "b", "c"], [1, 2, 3, 4, 5, 6], counts=[2, 1, 3])
    parts = split_by_owner(step, {"a": b"x", "b": b"y", "c": b"x"})
    tokens = {client: list(part.by_request()) for client, part in parts.items()}
    assert tokens == {b"x": [("a", [1, 2]), ("c", [4, 5, 6])], b"y": [("b", [3])]}
