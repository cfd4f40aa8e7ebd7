"""A step that fails: only those at fault end, nobody else loses a token, and the cache holds no lie."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import Engine, Row, SymbolicWorker, continuation

from quire.data.plan import StepPlan, StepResult

POISON = 96


class FragileWorker(SymbolicWorker):
    """Fails when a row that holds the poisoned token is asked for a new one, before or after it writes."""

    writes_first = False

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.released:
            self.rows.pop(row, None)
        for new in plan.admitted:
            self.rows[new.row] = Row.of(new)
        quiet = StepPlan(**{name: getattr(plan, name) for name in plan.__struct_fields__})
        quiet.released, quiet.admitted = [], []
        poisoned = any(
            POISON in self.rows[row].tokens
            for row, samples in zip(plan.rows.tolist(), plan.samples, strict=True)
            if samples
        )
        if poisoned and not self.writes_first:
            raise RuntimeError("poison")
        result = super().run(quiet)
        if poisoned:
            raise RuntimeError("poison")
        return result


def make_engine(writes_first: bool, **limits: Any) -> Engine:
    engine = Engine(**limits)
    engine.worker = FragileWorker(engine.worker.num_blocks, engine.worker.block_size)
    engine.worker.writes_first = writes_first
    return engine


def healthy_prompt(number: int, length: int) -> list[int]:
    return [(number * 11 + 3 * i) % 90 for i in range(length)]


def clean(prompt: list[int], count: int) -> int:
    """How many tokens come before the model itself says the poisoned one."""
    said = continuation(prompt, count)
    return said.index(POISON) + 1 if POISON in said else count


REQUESTS = st.lists(st.tuples(st.integers(1, 25), st.integers(1, 8), st.booleans()), min_size=1, max_size=9)
LIMITS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([14, 20, 60]),
        "max_num_seqs": st.integers(2, 5),
        "max_num_batched_tokens": st.integers(5, 40),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "depth": st.sampled_from([1, 2, 2, 3]),
        "lazy": st.booleans(),
    }
)


@settings(max_examples=200)
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
        expected = [] if poisoned else continuation(prompt, count)[: clean(prompt, count)]
        assert engine.outputs[str(number)] == expected
        finished_well = not poisoned and len(expected) == count
        assert engine.reasons[str(number)] == ("length" if finished_well else "error")
        first_runs = sum(str(number) in step.admitted for step in engine.steps)
        assert first_runs == 1 if expected else first_runs <= 1, "a failure swallows no first run"
    engine.check_empty()


@settings(max_examples=200)
@given(REQUESTS, st.booleans(), LIMITS, st.data())
def test_aborts_between_failures_leave_no_lie_in_the_cache(
    requests: list[tuple[int, int, bool]], writes_first: bool, limits: dict[str, Any], data: st.DataObject
) -> None:
    """Who is aborted while its step is in flight may have left blocks that are findable and never written."""
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
        prompt, said = healthy_prompt(number % 3, length), engine.outputs[str(number)]
        expected = [] if poisoned else continuation(prompt, count)[: clean(prompt, count)]
        assert said == (expected[: len(said)] if str(number) in aborted else expected)
        if str(number) not in aborted:
            finished_well = not poisoned and len(expected) == count
            assert engine.reasons[str(number)] == ("length" if finished_well else "error")
    engine.check_empty()
