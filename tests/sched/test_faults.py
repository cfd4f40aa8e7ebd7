"""Tests of failed steps: only requests at fault end, others keep all tokens, and the cache stays valid."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import LAYOUTS, BreakableWorker, Engine, continuation, widened

from quire.data.step_plan import StepPlan
from quire.sched import limits as step_limits

POISON = 96


class PoisonedWorker(BreakableWorker):
    """A worker that fails when it samples for a row that holds the poisoned token."""

    def breaks(self, plan: StepPlan) -> bool:
        return any(
            POISON in self.rows[row].tokens
            for row, samples in zip(plan.rows.tolist(), plan.samples, strict=True)
            if samples
        )


class LimitedWorker(BreakableWorker):
    """A worker that fails above a number of rows or tokens."""

    max_rows = max_tokens = 10_000

    def breaks(self, plan: StepPlan) -> bool:
        return len(plan.rows) > self.max_rows or plan.total_tokens > self.max_tokens


def make_engine(writes_first: bool, **limits: Any) -> Engine:
    engine = Engine(**limits)
    engine.use(PoisonedWorker).writes_first = writes_first
    return engine


def healthy_prompt(number: int, length: int) -> list[int]:
    return [(number * 11 + 3 * i) % 90 for i in range(length)]


def num_tokens_before_poison(prompt: list[int], count: int) -> int:
    """Return the number of output tokens before the model generates the poisoned one."""
    output = continuation(prompt, count)
    return output.index(POISON) + 1 if POISON in output else count


REQUESTS = st.lists(st.tuples(st.integers(1, 25), st.integers(1, 8), st.booleans()), min_size=1, max_size=9)
LIMITS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["full", *LAYOUTS]),
        "num_blocks": st.sampled_from([14, 20, 60]),
        "max_num_seqs": st.integers(2, 5),
        "max_num_batched_tokens": st.integers(5, 40),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "depth": st.sampled_from([1, 2, 2, 3]),
        "num_stages": st.sampled_from([1, 1, 2, 3]),
        "lazy": st.booleans(),
    }
).map(lambda limits: widened(limits, 34))


@settings(max_examples=60)
@given(REQUESTS, st.booleans(), LIMITS)
def test_only_poisoned_requests_end_in_error(
    requests: list[tuple[int, int, bool]], writes_first: bool, limits: dict[str, Any]
) -> None:
    engine = make_engine(writes_first, **limits)
    for number, (length, count, poisoned) in enumerate(requests):
        prompt = healthy_prompt(number % 3, length) + ([POISON] if poisoned else [])
        engine.add(str(number), prompt, count)
    engine.run()
    for number, (length, count, poisoned) in enumerate(requests):
        prompt = healthy_prompt(number % 3, length)
        expected = [] if poisoned else continuation(prompt, count)[: num_tokens_before_poison(prompt, count)]
        assert engine.outputs[str(number)] == expected
        finished_well = not poisoned and len(expected) == count
        assert engine.reasons[str(number)] == ("length" if finished_well else "error")
        first_runs = sum(str(number) in step.admitted for step in engine.steps)
        assert first_runs == 1 if expected else first_runs <= 1, "a failure hides no first run"
    engine.check_empty()


@settings(max_examples=60)
@given(REQUESTS, st.booleans(), LIMITS, st.data())
def test_aborts_between_failures_keep_the_cache_valid(
    requests: list[tuple[int, int, bool]], writes_first: bool, limits: dict[str, Any], data: st.DataObject
) -> None:
    """Check that a request aborted while its step is in flight leaves no indexed block that was never
    written.
    """
    engine = make_engine(writes_first, **limits)
    for number, (length, count, poisoned) in enumerate(requests):
        engine.add(str(number), healthy_prompt(number % 3, length) + ([POISON] if poisoned else []), count)
    aborted: set[str] = set()
    while engine.core.has_work:
        if data.draw(st.integers(0, 3)) == 0:
            victim = str(data.draw(st.integers(0, len(requests) - 1)))
            aborted |= {victim} if engine.abort(victim) else set()
        engine.step()
    for number, (length, count, poisoned) in enumerate(requests):
        prompt, output = healthy_prompt(number % 3, length), engine.outputs[str(number)]
        expected = [] if poisoned else continuation(prompt, count)[: num_tokens_before_poison(prompt, count)]
        assert output == (expected[: len(output)] if str(number) in aborted else expected)
        if str(number) not in aborted:
            finished_well = not poisoned and len(expected) == count
            assert engine.reasons[str(number)] == ("length" if finished_well else "error")
    engine.check_empty()


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(REQUESTS, st.booleans(), LIMITS, st.data())
def test_faults_with_many_examples(
    requests: list[tuple[int, int, bool]], writes_first: bool, limits: dict[str, Any], data: st.DataObject
) -> None:
    """Run the two tests above with many more examples."""
    test_only_poisoned_requests_end_in_error.hypothesis.inner_test(requests, writes_first, limits)
    test_aborts_between_failures_keep_the_cache_valid.hypothesis.inner_test(
        requests, writes_first, limits, data
    )


def limited_engine(max_rows: int = 10_000, max_tokens: int = 10_000, **limits: Any) -> Engine:
    engine = Engine(**limits)
    worker = engine.use(LimitedWorker)
    worker.max_rows, worker.max_tokens = max_rows, max_tokens
    return engine


@settings(max_examples=40)
@given(REQUESTS, LIMITS, st.integers(1, 4), st.integers(5, 40), st.booleans())
def test_oversized_batches_are_retried_without_losing_requests(
    requests: list[tuple[int, int, bool]],
    limits: dict[str, Any],
    max_rows: int,
    max_tokens: int,
    writes_first: bool,
) -> None:
    """Check that requests do not alternate forever between small and failing batches, and long prompts
    finish.
    """
    engine = limited_engine(max_rows, max_tokens, **limits)
    engine.worker.writes_first = writes_first  # type: ignore[attr-defined]
    for number, (length, count, _) in enumerate(requests):
        engine.add(str(number), healthy_prompt(number, length), count)
    engine.run()
    for number, (length, count, _) in enumerate(requests):
        assert engine.outputs[str(number)] == continuation(healthy_prompt(number, length), count)
        assert engine.reasons[str(number)] == "length"
    assert len(engine.plans) <= 30 + 3 * sum(length + count for length, count, _ in requests)
    engine.check_empty()


def test_failed_batch_size_is_halved_and_grows_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(step_limits.log, "warning", lambda text, *values: warnings.append(text % values))
    engine = limited_engine(max_rows=5, num_blocks=4000, max_num_seqs=32, max_num_batched_tokens=512)
    engine.check_index = lambda: None  # type: ignore[method-assign]  # slow; the tests above have it
    for number in range(60):
        engine.add(str(number), healthy_prompt(number, 6), 100)
    engine.run(max_steps=6000)
    failures = sum(len(plan.rows) > 5 for plan in engine.plans)
    assert failures == len(warnings) <= 10, "each failure lowers the limit"
    assert sum(len(plan.rows) == 5 for plan in engine.plans) > 100, "a batch size that fits is used again"
    assert (
        "32 requests" in warnings[0]
        and "at most 16 requests" in warnings[0]
        and "max_num_seqs (32)" in warnings[0]
    )
    for number in range(60):
        assert engine.outputs[str(number)] == continuation(healthy_prompt(number, 6), 100)


@pytest.mark.parametrize(
    ("passed", "failed", "left"),
    [
        ((0, 0), (32, 400), (16, 200)),
        ((0, 0), (32, 32), (16, 512)),
        ((32, 32), (8, 400), (32, 200)),
        ((2, 500), (8, 400), (4, 512)),
        ((32, 512), (32, 32), (16, 512)),
        ((32, 512), (30, 300), (15, 150)),
    ],
    ids=["nothing known", "decodes", "rows went well", "tokens went well", "no longer", "neither any more"],
)
def test_shrink_halves_rows_or_tokens(
    passed: tuple[int, int], failed: tuple[int, int], left: tuple[int, int]
) -> None:
    limits = step_limits.StepLimits(max_rows=32, max_tokens=512)
    limits.record_success(*passed)
    limits.shrink(*failed)
    assert (limits.max_rows, limits.max_tokens) == left


def test_row_limit_stays_when_too_many_tokens_fail() -> None:
    """Check that a failing large prompt does not shrink a decode batch that always succeeded."""
    engine = limited_engine(max_tokens=40, num_blocks=400, max_num_seqs=16, max_num_batched_tokens=128)
    for number in range(16):
        engine.add(str(number), healthy_prompt(number, 2), 60)
    for _ in range(5):
        engine.step()
    engine.abort("3")
    engine.add("long", healthy_prompt(50, 100), 4)
    engine.run()
    assert (engine.scheduler.limits.max_rows, engine.reasons["long"]) == (16, "length")
    assert engine.outputs["long"] == continuation(healthy_prompt(50, 100), 4)


def test_poisoned_request_lowers_no_limit() -> None:
    engine = make_engine(False, max_num_seqs=4, max_num_batched_tokens=32)
    for number in range(4):
        engine.add(str(number), healthy_prompt(number, 9) + [POISON] * (number == 2), 6)
    engine.run()
    assert engine.reasons["2"] == "error"
    assert (engine.scheduler.limits.max_rows, engine.scheduler.limits.max_tokens) == (4, 32)
