"""What must hold for any traffic. The invariants of every step are checked inside `Engine.check`."""

from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import Engine, continuation

from quire.data.params import SamplingParams

TRAFFIC = st.lists(
    st.tuples(
        st.integers(0, 2),  # which common prefix
        st.integers(1, 30),  # prompt length
        st.integers(1, 12),  # output length
        st.integers(0, 6),  # steps before the next arrival
        st.integers(0, 3),  # priority
    ),
    min_size=1,
    max_size=14,
)
LIMITS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(13, 40),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 3, 7]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "share": st.booleans(),
        "reserve_full_prompt": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1]),
    }
)


def make_prompt(family: int, length: int, own: int) -> list[int]:
    """Three quarters common to the family, the rest the request's own."""
    common = [(family * 31 + 5 * i) % 97 for i in range(length)]
    return common[: 3 * length // 4] + [(own * 13 + i) % 97 for i in range(length - 3 * length // 4)]


def drive(traffic: list[tuple[int, int, int, int, int]], limits: dict, *, at_once: bool = False) -> Engine:
    engine = Engine(**limits)
    for number, (family, length, count, pause, priority) in enumerate(traffic):
        params = SamplingParams(max_tokens=count, prompt_logprobs=1 if number % 5 == 4 else None)
        engine.add(str(number), make_prompt(family, length, number), count, priority=priority, params=params)
        for _ in range(0 if at_once else pause):
            engine.step() if engine.scheduler.has_work else None
    engine.run()
    return engine


@settings(max_examples=150)
@given(TRAFFIC, LIMITS)
def test_every_admitted_request_finishes_with_its_own_tokens(traffic: list, limits: dict) -> None:
    engine = drive(traffic, limits)
    for number, (family, length, count, _, _) in enumerate(traffic):
        assert engine.outputs[str(number)] == continuation(make_prompt(family, length, number), count)
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable, "blocks leaked"
    assert all(block.num_users == 0 for block in engine.kv.pool.blocks[1:])
    assert all(not row for row in engine.scheduler.running.requests)


@settings(max_examples=60)
@given(TRAFFIC, LIMITS)
def test_outputs_do_not_depend_on_when_requests_arrive(traffic: list, limits: dict) -> None:
    assert drive(traffic, limits).outputs == drive(traffic, limits, at_once=True).outputs


@settings(max_examples=60)
@given(TRAFFIC, LIMITS, st.data())
def test_aborts_at_any_moment_hurt_nobody_else(traffic: list, limits: dict, data: st.DataObject) -> None:
    engine = Engine(**limits)
    for number, (family, length, count, _, priority) in enumerate(traffic):
        engine.add(str(number), make_prompt(family, length, number), count, priority=priority)
    aborted = set()
    while engine.scheduler.has_work:
        if data.draw(st.integers(0, 3)) == 0:
            victim = str(data.draw(st.integers(0, len(traffic) - 1)))
            aborted |= set(engine.scheduler.abort([victim]))
        if engine.scheduler.has_work:
            engine.step()
    for number, (family, length, count, _, _) in enumerate(traffic):
        expected = continuation(make_prompt(family, length, number), count)
        said = engine.outputs[str(number)]
        assert said == (expected[: len(said)] if str(number) in aborted else expected)
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable


@settings(max_examples=60)
@given(TRAFFIC, LIMITS)
def test_a_running_decode_never_skips_a_step_unless_preempted(traffic: list, limits: dict) -> None:
    """Continuous batching: once a request decodes, every step gives it a token."""
    limits = limits | {
        "max_num_batched_tokens": max(limits["max_num_batched_tokens"], limits["max_num_seqs"])
    }
    engine = Engine(**limits)
    for number, (family, length, count, _, priority) in enumerate(traffic):
        engine.add(str(number), make_prompt(family, length, number), count, priority=priority)
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
