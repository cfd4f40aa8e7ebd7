"""Properties that hold for any traffic, with one step at a time and with several in flight.

`Engine.check` and `Engine.check_index` check the invariants of every step.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from symbolic import LAYOUTS, Engine, continuation, logprobs_of, widened

from quire.data.latency_target import LatencyTarget
from quire.data.params import SamplingParams


@dataclass(frozen=True)
class Arrival:
    family: int
    """Number of the common prefix."""
    length: int
    count: int
    pause: int
    """Number of steps before the next arrival."""
    priority: int
    eos_at: int | None
    """Index of the output token that is used as the end of sequence, if the output gets that long."""
    logprobs: bool
    prompt_logprobs: bool
    needs_value: bool


TRAFFIC = st.lists(
    st.builds(
        Arrival,
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        count=st.integers(1, 12),
        pause=st.integers(0, 6),
        priority=st.integers(0, 3),
        eos_at=st.none() | st.integers(0, 11),
        logprobs=st.booleans(),
        prompt_logprobs=st.sampled_from([False, False, False, True]),
        needs_value=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=14,
)
LONGEST = 30 + 12
LIMITS: dict[str, st.SearchStrategy[Any]] = {
    "layout": st.sampled_from(["full", *LAYOUTS]),
    "num_blocks": st.integers(13, 40),
    "max_num_seqs": st.integers(1, 6),
    "max_num_batched_tokens": st.integers(6, 40),
    "long_prefill_token_threshold": st.sampled_from([0, 3, 7]),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "chunked_prefill": st.sampled_from([True, True, False]),
    "share": st.booleans(),
    "reserve_full_prompt": st.booleans(),
    "watermark": st.sampled_from([0.0, 0.1]),
    "fair": st.booleans(),
    "targets": st.booleans(),
    "drafts": st.sampled_from([None, "host", "worker"]),
    "num_slots": st.integers(1, 6),
    "unit": st.sampled_from([4, 4, 8]),
    "interval": st.sampled_from([0, 8]),
}
ONE_BY_ONE = st.fixed_dictionaries(LIMITS).map(lambda limits: widened(limits, LONGEST))
IN_FLIGHT = {
    "depth": st.sampled_from([2, 2, 3]),
    "lazy": st.booleans(),
    "num_stages": st.sampled_from([1, 1, 2, 3]),
}
OVERLAPPED = st.fixed_dictionaries(LIMITS | IN_FLIGHT).map(lambda limits: widened(limits, LONGEST))


def make_prompt(number: int, arrival: Arrival) -> list[int]:
    """Return a prompt of which three quarters are common to the family."""
    length = arrival.length
    common = [(arrival.family * 31 + 5 * i) % 97 for i in range(length)]
    return common[: 3 * length // 4] + [(number * 13 + i) % 97 for i in range(length - 3 * length // 4)]


def answer(number: int, arrival: Arrival) -> tuple[list[int], int]:
    """Return the expected output of the request and its end-of-sequence id."""
    output = continuation(make_prompt(number, arrival), arrival.count)
    if arrival.eos_at is None or arrival.eos_at >= arrival.count:
        return output, -1
    eos_id = output[arrival.eos_at]
    return output[: output.index(eos_id) + 1], eos_id


def add(engine: Engine, number: int, arrival: Arrival, **progress: Any) -> None:
    params = SamplingParams(
        max_tokens=arrival.count,
        logprobs=0 if arrival.logprobs else None,
        prompt_logprobs=1 if arrival.prompt_logprobs else None,
    )
    params.bad_words_token_ids = [[1, 2]] if arrival.needs_value else None
    engine.add(
        str(number),
        make_prompt(number, arrival),
        arrival.count,
        priority=arrival.priority,
        tenant=arrival.family,
        target=LatencyTarget(0.001 * arrival.family, 0.001),
        params=params,
        eos_id=answer(number, arrival)[1],
        **progress,
    )


def drive(traffic: list[Arrival], limits: dict[str, Any], *, at_once: bool = False) -> Engine:
    engine = Engine(**limits)
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
        for _ in range(0 if at_once else arrival.pause):
            engine.step() if engine.core.has_work else None
    while engine.core.has_work:
        num_plans, num_in_flight = len(engine.plans), len(engine.core.step_queue)
        engine.step()
        assert num_in_flight or len(engine.plans) > num_plans, "requests wait, and nothing can run"
    return engine


def check_answers(engine: Engine, traffic: list[Arrival], aborted: Set[str] = frozenset()) -> None:
    for number, arrival in enumerate(traffic):
        output, (expected, _) = engine.outputs[str(number)], answer(number, arrival)
        assert output == (expected[: len(output)] if str(number) in aborted else expected)
        check_logprobs(engine, number, arrival, str(number) in aborted)
    engine.check_empty()


def check_logprobs(engine: Engine, number: int, arrival: Arrival, aborted: bool) -> None:
    """Check that each position has one entry, in order, with the values of this request."""
    id, prompt = str(number), make_prompt(number, arrival)
    tokens = prompt + engine.outputs[id]
    assert all(step.prompt_logprobs.get(id, [0]) for step in engine.steps), "an empty list of logprobs"
    of_prompt = [logprobs for step in engine.steps for logprobs in step.prompt_logprobs.get(id, [])]
    wanted = [logprobs_of(tokens, at) for at in range(1, len(prompt))] if arrival.prompt_logprobs else []
    assert of_prompt == (wanted[: len(of_prompt)] if aborted else wanted)
    of_output = [logprobs for step in engine.steps for logprobs in step.logprobs.get(id, [])]
    wanted = [logprobs_of(tokens, at) for at in range(len(prompt), len(tokens))] if arrival.logprobs else []
    assert of_output == wanted


def check_stats(engine: Engine, traffic: list[Arrival]) -> None:
    """Check that every prompt and output token is counted once, in its own step."""
    stats = [step.stats for step in engine.steps]
    assert [step.num_sampled_tokens for step in stats] == [len(step.token_ids) for step in engine.steps]
    assert sum(step.num_preempted for step in stats) == engine.scheduler.num_preemptions
    check_first_runs(engine, traffic)


def check_first_runs(engine: Engine, traffic: list[Arrival]) -> None:
    """Check that every request is admitted once as new and its prompt is counted once."""
    num_prompt_tokens = sum(step.stats.num_prompt_tokens for step in engine.steps)
    assert num_prompt_tokens == sum(arrival.length for arrival in traffic)
    first_runs = [id for step in engine.steps for id in step.admitted]
    assert sorted(first_runs) == sorted(engine.outputs)


@settings(max_examples=40)
@given(TRAFFIC, ONE_BY_ONE)
def test_every_request_finishes_with_its_expected_tokens(
    traffic: list[Arrival], limits: dict[str, Any]
) -> None:
    engine = drive(traffic, limits)
    check_answers(engine, traffic)
    check_stats(engine, traffic)


@settings(max_examples=60)
@given(TRAFFIC, OVERLAPPED)
def test_steps_in_flight_do_not_change_outputs(traffic: list[Arrival], limits: dict[str, Any]) -> None:
    engine = drive(traffic, limits)
    check_answers(engine, traffic)
    check_stats(engine, traffic)


@settings(max_examples=25)
@given(TRAFFIC, OVERLAPPED)
def test_end_of_sequence_wastes_at_most_the_steps_in_flight(
    traffic: list[Arrival], limits: dict[str, Any]
) -> None:
    """Check that each token is computed once if all requests fit and share nothing.

    Only steps in flight behind an end of sequence are wasted; an end by length wastes nothing.
    """
    engine = drive(traffic, limits | {"num_blocks": 400, "share": False, "fair": False, "drafts": None})
    needed = sum(
        arrival.length + len(answer(number, arrival)[0]) - 1 for number, arrival in enumerate(traffic)
    )
    ends = sum(answer(number, arrival)[1] >= 0 for number, arrival in enumerate(traffic))
    assert needed <= engine.worker.num_computed <= needed + ends * (limits["depth"] - 1)


@settings(max_examples=20)
@given(TRAFFIC, ONE_BY_ONE | OVERLAPPED)
def test_outputs_do_not_depend_on_arrival_times(traffic: list[Arrival], limits: dict[str, Any]) -> None:
    assert drive(traffic, limits).outputs == drive(traffic, limits, at_once=True).outputs


@settings(max_examples=50)
@given(TRAFFIC, ONE_BY_ONE | OVERLAPPED, st.data())
def test_aborts_do_not_affect_other_requests(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    engine = Engine(**limits)
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
    aborted: set[str] = set()
    while engine.core.has_work:
        what = data.draw(st.integers(0, 7))
        if what < 2:
            victim = str(data.draw(st.integers(0, len(traffic) - 1)))
            aborted |= {victim} if engine.abort(victim) else set()
        elif what == 2:
            engine.core.reset_prefix_cache()
        engine.step()
    check_answers(engine, traffic, aborted)


@settings(max_examples=25)
@given(TRAFFIC, OVERLAPPED, st.data())
def test_cleared_engine_behaves_as_new(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    """Check that discarded steps in flight still run before later ones."""
    engine = Engine(**limits)
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
    for _ in range(data.draw(st.integers(1, 8))):
        engine.step()
    engine.core.clear()
    engine.check_empty()
    engine.steps, engine.reasons = [], {}
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
    engine.run()
    check_answers(engine, traffic)


@settings(max_examples=40)
@given(TRAFFIC, ONE_BY_ONE | OVERLAPPED, st.data())
def test_new_core_continues_requests_of_a_dead_core(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    """Check a front end that received all but the last steps of the dead core.

    Tokens and logprobs come once, no request is admitted twice as new, and no prompt is counted twice.
    """
    dead, core = Engine(**limits), Engine(**limits)
    for number, arrival in enumerate(traffic):
        add(dead, number, arrival)
    for _ in range(data.draw(st.integers(1, 30))):
        dead.step() if dead.core.has_work else None
    received = dead.steps[: len(dead.steps) - data.draw(st.integers(0, min(3, len(dead.steps))))]
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(traffic))}
    for id, new in ((id, new) for step in received for id, new in step.by_request()):
        tokens[id] += new
    first_runs = {id: run for step in received for id, run in step.admitted.items()}
    ended = {id for step in received for id in step.finished}
    for number, arrival in enumerate(traffic):
        id = str(number)
        if id in ended:
            core.outputs[id] = tokens[id]
            continue
        of_prompt = [actual for step in received for actual in step.prompt_logprobs.get(id, [])]
        progress = {"output": tokens[id], "num_prompt_logprobs": len(of_prompt)}
        if id in first_runs:
            progress |= {"has_run": True, "num_cached": first_runs[id].num_cached}
        add(core, number, arrival, **progress)
    core.run()
    core.steps = [*received, *core.steps]
    check_answers(core, traffic)
    check_first_runs(core, traffic)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(TRAFFIC, ONE_BY_ONE | OVERLAPPED, st.data())
def test_properties_with_many_examples(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    """Run the tests above with many more examples."""
    test_steps_in_flight_do_not_change_outputs.hypothesis.inner_test(traffic, limits)
    test_aborts_do_not_affect_other_requests.hypothesis.inner_test(traffic, limits, data)


_SIZES = [(0, 1, 1), (0, 1, 0), (0, 7, 0), (2, 22, 0), *[(0, 1, 0)] * 9, (1, 25, 0)]
CLAIMED = (
    [Arrival(*size[:2], 1, size[2], 0, None, False, False, False) for size in _SIZES],
    {
        **{"layout": "full", "num_blocks": 13, "max_num_seqs": 2, "max_num_batched_tokens": 7},
        **{"long_prefill_token_threshold": 0, "policy": "fcfs", "share": False, "watermark": 0.0},
        **{"reserve_full_prompt": False, "fair": True, "drafts": None},
    },
)
"""An example in which a preemption leaves tokens to the next waiting request in a step that admits none."""


@settings(max_examples=20)
@example(*CLAIMED)
@given(TRAFFIC, ONE_BY_ONE)
def test_only_oversized_prompts_are_split_without_chunked_prefill(
    traffic: list[Arrival], limits: dict[str, Any]
) -> None:
    engine = drive(traffic, limits | {"chunked_prefill": False})
    check_answers(engine, traffic)
    for plan in engine.plans:
        num_tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
        for new in plan.admitted:
            pending = len(new.token_ids) - new.num_computed
            assert num_tokens[new.row] == pending or pending > engine.scheduler.limits.max_chunk


@settings(max_examples=20)
@given(TRAFFIC, ONE_BY_ONE)
def test_running_decode_gets_a_token_in_every_step_unless_preempted(
    traffic: list[Arrival], limits: dict[str, Any]
) -> None:
    limits = limits | {
        "max_num_batched_tokens": max(limits["max_num_batched_tokens"], limits["max_num_seqs"])
    }
    engine = Engine(**limits)
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
    while engine.scheduler.has_work:
        running = engine.scheduler.running
        decoding = {
            running.ids[row]
            for row in running.order
            if running.num_tokens[row] - running.num_computed[row] == 1
        }
        output = engine.step()
        waiting_again = {
            id for id in decoding if id in engine.scheduler.requests and engine.scheduler.requests[id].row < 0
        }
        assert decoding - waiting_again <= set(output.request_ids)
