"""A step that fails: only those at fault end, nobody else loses a token, and the cache holds no lie."""

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
            self.rows[new.row] = Row(list(new.token_ids), new.num_computed, list(new.block_ids))
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


def drive(engine: Engine, writes_first: bool) -> None:
    worker = FragileWorker(engine.worker.num_blocks, engine.worker.block_size)
    worker.writes_first = writes_first
    scheduler = engine.scheduler
    for _ in range(5000):
        if not scheduler.has_work:
            return
        plan = scheduler.plan()
        engine.check(plan)
        try:
            result = worker.run(plan)
        except RuntimeError:
            engine.reasons |= {id: finish.reason for id, finish in scheduler.fail(plan).items()}
            continue
        output = scheduler.update(plan, result)
        for id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            engine.outputs[id].append(token_id)
        engine.reasons |= {id: finish.reason for id, finish in output.finished.items()}
    raise AssertionError("requests still unfinished")


def healthy_prompt(number: int, length: int) -> list[int]:
    return [(number * 11 + 3 * i) % 90 for i in range(length)]


def clean(prompt: list[int], count: int) -> int:
    """How many tokens come before the model itself says the poisoned one."""
    said = continuation(prompt, count)
    return said.index(POISON) + 1 if POISON in said else count


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 25), st.integers(1, 8), st.booleans()), min_size=1, max_size=9),
    st.booleans(),
    st.integers(5, 40),
    st.sampled_from(["fcfs", "priority"]),
)
def test_only_poisoned_requests_end_in_error(
    requests: list[tuple[int, int, bool]], writes_first: bool, budget: int, policy: str
) -> None:
    engine = Engine(num_blocks=60, max_num_seqs=5, max_num_batched_tokens=budget, policy=policy)
    for number, (length, count, poisoned) in enumerate(requests):
        prompt = healthy_prompt(number % 3, length) + ([POISON] if poisoned else [])
        engine.add(str(number), prompt, count)
    drive(engine, writes_first)
    for number, (length, count, poisoned) in enumerate(requests):
        prompt = healthy_prompt(number % 3, length)
        expected = [] if poisoned else continuation(prompt, count)[: clean(prompt, count)]
        assert engine.outputs[str(number)] == expected
        finished_well = not poisoned and len(expected) == count
        assert engine.reasons[str(number)] == ("length" if finished_well else "error")
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable
