"""Tests of the scheduler's rules, without a device."""

import re
from typing import Any

import numpy as np
import pytest
from symbolic import Engine, continuation

from quire.data.params import RepetitionDetectionParams, SamplingParams
from quire.data.step_plan import StepOutput, StepPlan, StepResult
from quire.sched import preemption


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 97 for i in range(length)]


def scheduled_tokens(engine: Engine, step: int) -> dict[str, int]:
    """Run a step and return the number of scheduled tokens by request id."""
    plan = engine.plans[step]
    ids = engine.scheduler.running.ids
    return {ids[row]: count for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)}


def cached_tokens(step: StepOutput) -> dict[str, int]:
    """Return the number of cached prompt tokens by request that ran for the first time."""
    return {id: run.num_cached for id, run in step.admitted.items()}


def test_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add("a", prompt(25))
    engine.run()
    assert [plan.total_tokens for plan in engine.plans[:4]] == [10, 10, 5, 1]
    assert engine.outputs["a"] == continuation(prompt(25), 4)


def test_decodes_continue_during_chunked_prefill() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("long", prompt(40), count=2)
    engine.step()
    engine.add("short", prompt(3, 50), count=6)
    for _ in range(3):
        engine.step()
    assert scheduled_tokens(engine, 1) == {"long": 8}
    engine.run()
    assert engine.outputs["short"] == continuation(prompt(3, 50), 6)


def test_decodes_are_scheduled_before_an_older_prompt() -> None:
    """Check that a prompt admitted first does not starve a decode admitted later."""
    engine = Engine(max_num_batched_tokens=8, long_prefill_token_threshold=5)
    engine.add("long", prompt(60), count=2)
    engine.add("short", prompt(3, 50), count=8)
    engine.step()
    assert scheduled_tokens(engine, 0) == {"long": 5, "short": 3}
    engine.scheduler.limits.longest_chunk = 8
    engine.step()
    assert scheduled_tokens(engine, 1) == {"long": 7, "short": 1}


def test_long_prefill_threshold_limits_each_prompt() -> None:
    engine = Engine(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    engine.add("a", prompt(30))
    engine.add("b", prompt(30, 40))
    engine.step()
    assert scheduled_tokens(engine, 0) == {"a": 6, "b": 6}


def test_rows_never_exceed_max_num_seqs() -> None:
    engine = Engine(max_num_seqs=3)
    for i in range(7):
        engine.add(str(i), prompt(4, i), count=3)
    engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == 3
    assert all(engine.outputs[str(i)] == continuation(prompt(4, i), 3) for i in range(7))


def test_prompt_waits_for_a_whole_step_without_chunked_prefill() -> None:
    engine = Engine(max_num_batched_tokens=16, chunked_prefill=False)
    engine.add("a", prompt(10))
    engine.add("b", prompt(10, 40))
    engine.step()
    engine.step()
    assert engine.plans[0].total_tokens == 10
    assert engine.plans[1].total_tokens == 11


def test_preempted_request_may_be_chunked_without_chunked_prefill() -> None:
    """Check a prompt and output that together exceed any step."""
    engine = Engine(num_blocks=9, max_num_batched_tokens=16, chunked_prefill=False)
    engine.add("a", prompt(8), count=20)
    engine.add("b", prompt(8, 30), count=20)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert max(len(new.token_ids) for plan in engine.plans for new in plan.admitted) > 16
    for id, start in (("a", 0), ("b", 30)):
        assert engine.outputs[id] == continuation(prompt(8, start), 20)


def test_new_request_joins_the_next_step() -> None:
    engine = Engine()
    engine.add("a", prompt(5), count=10)
    engine.step()
    engine.add("b", prompt(6, 30), count=2)
    engine.step()
    assert scheduled_tokens(engine, 1) == {"a": 1, "b": 6}


def test_priority_policy_admits_most_urgent_first() -> None:
    engine = Engine(max_num_seqs=1, policy="priority")
    for id, priority, arrived in (
        ("late", 5, 1.0),
        ("second", 1, 3.0),
        ("first", 1, 2.0),
        ("urgent", -3, 9.0),
    ):
        engine.add(id, prompt(4), count=1, priority=priority, arrived_at=arrived)
    engine.run()
    assert list(engine.reasons) == ["urgent", "first", "second", "late"]


def test_priority_policy_preempts_least_urgent() -> None:
    engine = Engine(num_blocks=9, policy="priority")
    engine.add("lax", prompt(8), count=20, priority=9)
    engine.add("urgent", prompt(8, 30), count=20, priority=0)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert list(engine.reasons) == ["urgent", "lax"]
    assert engine.outputs["lax"] == continuation(prompt(8), 20)


def test_preempted_requests_resume_with_same_tokens() -> None:
    """Check 64 long requests with cache blocks for barely two: all finish, none repeats or loses a token."""
    engine = Engine(num_blocks=16, max_num_seqs=64, max_num_batched_tokens=64)
    for i in range(64):
        engine.add(str(i), prompt(10, i), count=18)
    engine.run(max_steps=20_000)
    assert engine.scheduler.num_preemptions > 0
    for i in range(64):
        assert engine.outputs[str(i)] == continuation(prompt(10, i), 18), f"request {i}"


def test_preemption_warning_has_count_and_remedies_and_is_rate_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(preemption.log, "warning", lambda text, *values: warnings.append(text % values))
    engine = Engine(num_blocks=9, max_num_seqs=8)
    for i in range(4):
        engine.add(str(i), prompt(8, 20 * i), count=20)
    engine.run()
    assert engine.scheduler.num_preemptions > 1
    (warning,) = warnings
    assert re.match(
        r"Sequence group \d is preempted by PreemptionMode\.RECOMPUTE mode because there is not enough "
        r"KV cache space\. .*total_cumulative_preemption_cnt=1$",
        warning,
    )
    remedies = (
        "Increase gpu_memory_utilization or tensor_parallel_size",
        "Increasing pipeline_parallel_size",
        "decreasing max_num_seqs, max_num_batched_tokens or max_model_len",
    )
    assert [remedy for remedy in remedies if remedy not in warning] == []


def test_oldest_request_is_never_preempted() -> None:
    engine = Engine(num_blocks=9, max_num_seqs=8)
    oldest = engine.add("oldest", prompt(8), count=20)
    for i in range(3):
        engine.add(str(i), prompt(8, 20 * i), count=20)
    engine.run()
    assert engine.scheduler.num_preemptions > 0 and oldest.num_preemptions == 0


def test_second_prompt_reuses_blocks_of_the_first() -> None:
    engine = Engine()
    engine.add("a", prompt(18))
    engine.run()
    engine.add("b", prompt(18))
    output = engine.step()
    assert output.admitted["b"].num_cached == 16
    assert (output.stats.prefix_queries, output.stats.prefix_hits) == (18, 16)
    engine.run()
    assert engine.outputs["b"] == engine.outputs["a"]


def test_fully_cached_prompt_computes_its_last_token() -> None:
    engine = Engine(block_size=4)
    engine.add("a", prompt(16))
    engine.run()
    engine.add("b", prompt(16))
    assert cached_tokens(engine.step()) == {"b": 12}


def test_generated_tokens_are_shared() -> None:
    engine = Engine(block_size=4)
    engine.add("a", prompt(6), count=10)
    engine.run()
    engine.add("b", prompt(6) + engine.outputs["a"], count=1)
    assert cached_tokens(engine.step()) == {"b": 12}


def test_parallel_samples_share_their_prompt_in_one_step() -> None:
    """Check n > 1: the prompt is computed once, except for its unfinished last block."""
    engine = Engine(block_size=4, max_num_batched_tokens=64)
    for k in range(4):
        engine.add(f"{k}_x", prompt(18), count=3)
    engine.step()
    assert engine.plans[0].num_tokens.tolist() == [18, 2, 2, 2]
    assert len({block.id for table in engine.kv.tables[0] for block in table if block}) == 4 + 4


def test_cache_salt_separates_prefixes() -> None:
    engine = Engine(max_num_batched_tokens=64)
    engine.add("a", prompt(18), cache_salt="one")
    engine.run()
    engine.add("b", prompt(18), cache_salt="two")
    engine.add("c", prompt(18))
    engine.add("d", prompt(18), cache_salt="one")
    assert cached_tokens(engine.step()) == {"b": 0, "c": 0, "d": 16}


def test_prompt_logprobs_skip_the_prefix_cache() -> None:
    engine = Engine()
    engine.add("a", prompt(18))
    engine.run()
    engine.add("b", prompt(18), params=SamplingParams(max_tokens=4, prompt_logprobs=1))
    assert cached_tokens(engine.step()) == {"b": 0}


def test_no_blocks_are_shared_without_prefix_caching() -> None:
    engine = Engine(share=False)
    engine.add("a", prompt(18))
    engine.run()
    engine.add("b", prompt(18))
    assert cached_tokens(engine.step()) == {"b": 0}


def test_reset_prefix_cache_waits_until_no_block_is_held() -> None:
    engine = Engine()
    engine.add("a", prompt(18), count=4)
    engine.step()
    assert not engine.kv.reset()
    engine.run()
    assert engine.kv.reset()
    engine.add("b", prompt(18))
    assert cached_tokens(engine.step()) == {"b": 0}


def test_abort_frees_running_and_waiting_requests() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", prompt(9), count=50)
    engine.add("b", prompt(9), count=50)
    engine.step()
    finished = engine.scheduler.abort(["a", "b", "unknown", "a"])
    assert {id: finish.reason for id, finish in finished.items()} == {"a": "abort", "b": "abort"}
    assert not engine.scheduler.has_work
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_conditions(depth: int) -> None:
    output = continuation(prompt(5), 12)
    assert len(set(output[:4])) == 4
    cases: dict[str, Any] = {
        "eos": ({"eos_id": output[2]}, {}, 3, ("stop", None)),
        "stop id": ({}, {"stop_token_ids": [output[3]]}, 4, ("stop", output[3])),
        "length": ({}, {}, 12, ("length", None)),
        "eos before min_tokens": ({"eos_id": output[2]}, {"min_tokens": 6}, 12, ("length", None)),
        "eos one before min_tokens": ({"eos_id": output[2]}, {"min_tokens": 4}, 12, ("length", None)),
    }
    for name, (fields, params, length, why) in cases.items():
        engine = Engine(depth=depth)
        engine.add("a", prompt(5), count=12, params=SamplingParams(max_tokens=12, **params), **fields)
        engine.run()
        (finish,) = [finish for step in engine.steps for finish in step.finished.values()]
        assert (len(engine.outputs["a"]), (finish.reason, finish.stop_reason)) == (length, why), name


def test_repetition_detection_ends_a_request() -> None:
    class Parrot:
        def run(self, plan: StepPlan) -> StepResult:
            return StepResult(token_ids=np.full(int(plan.samples.sum()), 5, np.int32))

    engine = Engine(share=False)
    engine.worker = Parrot()  # type: ignore[assignment]
    detection = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=4)
    engine.add("a", prompt(5), count=50, params=SamplingParams(max_tokens=50, repetition_detection=detection))
    engine.run()
    assert engine.reasons == {"a": "repetition"}
    assert engine.outputs["a"] == [5] * 4


def test_admission_reserves_blocks_for_running_requests() -> None:
    """Check that no request is admitted only to be preempted while others grow."""
    engine = Engine(num_blocks=13, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    for i in range(4):
        engine.add(str(i), prompt(14, 20 * i), count=6)
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_watermark_keeps_blocks_free_at_admission() -> None:
    engine = Engine(num_blocks=41, block_size=4, watermark=0.5, max_num_batched_tokens=512)
    for i in range(6):
        engine.add(str(i), prompt(16, 15 * i), count=2)
    engine.step()
    assert len(engine.scheduler.running) == 4


def test_stats_count_prompt_and_sampled_tokens_once() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add("a", prompt(25), count=3)
    engine.run()
    assert sum(step.stats.num_prompt_tokens for step in engine.steps) == 25
    assert sum(step.stats.num_sampled_tokens for step in engine.steps) == 3
    assert engine.steps[-1].stats.kv_usage == 0.0
