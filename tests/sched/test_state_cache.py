"""Tests of checkpoints of SSM states: where they are taken, found and evicted."""

from typing import Any

import pytest
from symbolic import BreakableWorker, Engine, continuation

from quire.data.params import SamplingParams
from quire.data.step_plan import StepPlan
from quire.sched.state_cache import StateCache


def numbers(count: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + 31 * at * at + 17 * at) % 97 for at in range(count)]


def hits_of(engine: Engine) -> dict[str, int]:
    return {id: run.num_cached for step in engine.steps for id, run in step.admitted.items()}


def answer(engine: Engine, id: str, prompt: list[int], count: int = 3, **fields: Any) -> int:
    """Answer one request and return the tokens of its hit."""
    engine.add(id, prompt, count, **fields)
    engine.run()
    assert engine.outputs[id] == continuation(prompt, count, fields.get("adapter_digest", b""))
    return hits_of(engine)[id]


@pytest.mark.parametrize(
    ("interval", "prompt", "expected"),
    [
        # tokens, tokens of the hit, tokens with cached pages
        (0, (63, 0, 0), []),
        (0, (64, 0, 0), []),
        (0, (65, 0, 0), [64]),
        (0, (200, 0, 100), [64, 192]),
        (0, (200, 64, 100), [192]),
        (0, (193, 192, 192), []),
        (128, (400, 0, 0), [128, 256, 384]),
        (128, (400, 128, 0), [256, 384]),
        (None, (2000, 0, 0), [1984]),
        (None, (2200, 0, 0), [1088, 2176]),
        (None, (2200, 1088, 1600), [1600, 2176]),
        (None, (16_400, 0, 0), [1024, 2048, 4096, 8192, 16_384]),
    ],
)
def test_boundaries(interval: int | None, prompt: tuple[int, int, int], expected: list[int]) -> None:
    states = StateCache(num_slots=1, max_rows=1, block_size=16, unit=64, interval=interval)
    assert states.boundaries(*prompt)[::-1] == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        # tokens, tokens of the hit, tokens with cached pages
        ((200, 0, 0), [192]),
        ((16_384, 15_808, 15_872), []),
        ((16_384, 15_808, 16_064), [16_064]),
        ((16_900, 15_808, 15_872), [16_896]),
        ((2200, 1088, 1600), [1600, 2176]),
    ],
)
def test_checkpoints_shortly_after_a_hit_are_left_out(
    prompt: tuple[int, int, int], expected: list[int]
) -> None:
    states = StateCache(num_slots=1, max_rows=1, block_size=16, unit=64, least_gap=1024)
    assert states.boundaries(*prompt)[::-1] == expected


@pytest.mark.parametrize(
    ("shared", "separate", "at_once"), [(1600, 600, False), (1600, 600, True), (1500, 700, True)]
)
def test_all_but_the_first_of_64_requests_hit(shared: int, separate: int, at_once: bool) -> None:
    """Check a prefix that ends at no multiple of a large block, at the default settings of an engine."""
    engine = Engine(
        layout="state",
        num_blocks=3000,
        block_size=16,
        num_slots=32,
        unit=64,
        interval=None,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        depth=2 if at_once else 1,
    )
    engine.check_index = lambda: None  # type: ignore[method-assign]  # slow; test_properties has it
    prompts = [numbers(shared) + numbers(separate, seed=number + 2) for number in range(64)]
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, 1)
        if not at_once:
            engine.run()
    engine.run()
    hits = hits_of(engine)
    half, all_shared = (shared + separate) // 2 // 64 * 64, shared // 64 * 64
    assert hits.pop("0") == 0 and min(hits.values()) == half
    late = list(hits.values())[3:]
    assert late == [all_shared] * len(late)
    for number, prompt in enumerate(prompts):
        assert engine.outputs[str(number)] == continuation(prompt, 1)


def test_conversation_continues_from_the_end_of_its_last_prompt() -> None:
    engine, prompt = Engine(layout="state", num_slots=3), numbers(21)
    assert answer(engine, "first", prompt) == 0
    prompt = prompt + engine.outputs["first"] + numbers(9, seed=3)
    assert answer(engine, "second", prompt) == 20
    assert answer(engine, "third", prompt + engine.outputs["second"] + numbers(5, seed=4)) == 32


def test_steps_end_at_every_boundary() -> None:
    engine, prompt = Engine(layout="state", num_slots=8, interval=8), numbers(30)
    assert answer(engine, "first", prompt) == 0
    assert [plan.num_tokens.tolist() for plan in engine.plans[:5]] == [[8], [8], [8], [4], [2]]
    assert [answer(engine, str(length), prompt[:length]) for length in (9, 17, 25, 30)] == [8, 16, 24, 28]


def test_salt_separates_checkpoints() -> None:
    engine, prompt = Engine(layout="state"), numbers(21)
    assert answer(engine, "plain", prompt) == 0
    assert answer(engine, "salted", prompt, cache_salt="a") == 0
    assert answer(engine, "other salt", prompt, cache_salt="b") == 0
    assert answer(engine, "same salt", prompt, cache_salt="a") == 20
    assert answer(engine, "plain again", prompt) == 20


def test_least_recently_used_checkpoint_is_evicted() -> None:
    engine = Engine(layout="state", num_slots=2)
    first, second, third = (numbers(21, seed=seed) for seed in (1, 2, 3))
    for number, prompt in enumerate((first, second, first, third)):
        answer(engine, f"fill {number}", prompt)
    assert answer(engine, "first", first) == 20
    assert answer(engine, "second", second) == 0


def test_reset_forgets_checkpoints() -> None:
    engine, prompt = Engine(layout="state"), numbers(21)
    answer(engine, "first", prompt)
    assert engine.core.reset_prefix_cache()
    assert answer(engine, "second", prompt) == 0
    assert not [
        key for key in engine.kv.pool.index if not any(map(key.startswith, engine.seen[-1].block_keys))
    ]


def test_request_that_skips_the_cache_leaves_a_checkpoint() -> None:
    engine, prompt = Engine(layout="state"), numbers(21)
    answer(engine, "first", prompt)
    skipping = SamplingParams(max_tokens=3, skip_reading_prefix_cache=True)
    assert answer(engine, "second", prompt + numbers(8, seed=5), params=skipping) == 0
    assert answer(engine, "third", prompt + numbers(8, seed=5)) == 28


def test_preempted_request_resumes_from_its_checkpoint() -> None:
    engine, prompt = Engine(layout="state"), numbers(21)
    request = engine.add("a", prompt, 10)
    for _ in range(5):
        engine.step()
    before = engine.worker.num_computed
    engine.scheduler._preempt(request.row)
    engine.run()
    assert engine.outputs["a"] == continuation(prompt, 10)
    # the last token is never computed, and 20 tokens are restored
    assert engine.worker.num_computed - before == len(prompt) + 10 - 1 - 20


def test_requests_that_arrive_together_wait_for_the_first() -> None:
    """Check that a prefix is computed once, although a checkpoint is found only after its step."""
    engine, prompt = Engine(layout="state", max_num_batched_tokens=64), numbers(21)
    for number in range(3):
        engine.add(str(number), prompt, 1)
    engine.add("other", numbers(10, seed=9), 1)
    engine.run()
    assert hits_of(engine) == {"0": 0, "1": 20, "2": 20, "other": 0}
    assert [len(plan.admitted) for plan in engine.plans] == [1, 3, 0]


def test_states_alone_need_no_pages() -> None:
    """Check that a model without attention finds a checkpoint after all blocks were reused."""
    engine, prompt = Engine(layout="states alone", num_blocks=12, num_slots=8), numbers(21)
    answer(engine, "first", prompt)
    for number in range(4):
        answer(engine, str(number), numbers(30, seed=number + 5))
    assert engine.kv.pool.find(engine.seen[0].block_keys[0]) is None
    assert answer(engine, "again", prompt + [3]) == 20


class Breaking(BreakableWorker):
    """A worker that fails in the first step that takes a checkpoint."""

    is_broken = False

    def breaks(self, plan: StepPlan) -> bool:
        was_broken, self.is_broken = self.is_broken, self.is_broken or plan.saves.size > 0
        return self.is_broken and not was_broken


@pytest.mark.parametrize("writes_first", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_failed_step_leaves_no_checkpoint(writes_first: bool, lazy: bool) -> None:
    engine, prompt = Engine(layout="state", depth=2, lazy=lazy), numbers(21)
    engine.use(Breaking).writes_first = writes_first
    for id in ("a", "b"):
        engine.add(id, prompt, 3)
    engine.run()
    assert engine.outputs == {id: continuation(prompt, 3) for id in ("a", "b")}
    engine.check_empty()
