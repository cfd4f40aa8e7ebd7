"""Tests of the lower tiers of the KV cache, over a symbolic cache with host slots and files."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import continuation, widened
from tiered import TieredEngine

from quire.data.cache_hints import CacheHints
from quire.data.kv_tiers import LoadDone
from quire.sched.tier_index import TierIndex


def prompt_of(family: int, length: int) -> list[int]:
    return [(family * 31 + 5 * at) % 97 for at in range(length)]


def fill(engine: TieredEngine, first: int, count: int = 6) -> None:
    """Run requests that evict all earlier blocks."""
    for number in range(first, first + count):
        engine.add(f"filler{number}", prompt_of(number, 30), 2)
        engine.run()


def answer(engine: TieredEngine, id: str, prompt: list[int], count: int = 3, **fields: str) -> int:
    """Run a request, check its answer, and return the number of its cached prompt tokens."""
    request = engine.add(id, prompt, count, **fields)
    engine.run()
    assert engine.outputs[id] == continuation(prompt, count)
    return request.num_cached


@pytest.mark.parametrize("tier", ["num_host", "num_files"])
def test_an_evicted_prefix_comes_back_from_a_lower_tier(tier: str) -> None:
    engine = TieredEngine(num_blocks=12, **{tier: 100})
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    request = engine.add("again", prompt_of(0, 21), 3)
    engine.run()
    assert request.num_cached == 20, "five blocks of four tokens; the last token is computed"
    assert (request.num_from_host, request.num_from_disk) == ((20, 0) if tier == "num_host" else (0, 20))
    assert engine.outputs["again"] == continuation(prompt_of(0, 21), 3)
    engine.check_empty()
    engine.check_tiers()


@pytest.mark.parametrize("layout", ["full", "state"])
def test_tokens_of_lower_tiers_are_counted_once(layout: str) -> None:
    engine = TieredEngine(num_blocks=20, num_slots=2, layout=layout, num_host=100, num_files=100)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1, 12)
    engine.steps.clear()
    assert answer(engine, "again", prompt_of(0, 21)) == 20
    stats = [step.stats for step in engine.steps if step.stats is not None]
    assert sum(step.num_cached_tokens for step in stats) == 20
    assert sum(step.num_loaded_tokens for step in stats) == 20
    counts = engine.tiers.take_stats()
    num_entries = 5 if layout == "full" else 6
    assert counts.load_sizes == [num_entries] and counts.disk_bytes == 0
    assert counts.num_hits == 20 and counts.num_queries >= 21
    assert counts.disk_queries >= 60 and counts.disk_hits == 0 and len(counts.lookup_s) >= 13


def test_copies_under_way_use_a_share_of_host_memory() -> None:
    engine = TieredEngine(num_blocks=12, num_host=50, num_files=50, waits=True)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    engine.add("again", prompt_of(0, 21), 3)
    engine.step(0.0)
    counts = engine.tiers.take_stats()
    assert counts.host_read_share == 5 / 50
    engine.finish_all()
    engine.run()
    counts = engine.tiers.take_stats()
    assert (counts.host_read_share, counts.host_write_share) == (0, 0)


def test_workers_are_asked_for_the_times_of_stores() -> None:
    engine = TieredEngine(num_blocks=12, num_host=100, waits=True)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    assert not engine.copier.loads, "not before a second is over"
    engine.now = 2.0
    answer(engine, "next", prompt_of(9, 9))
    ((load, future),) = engine.copier.loads
    assert load.keys == []
    engine.copier.loads.clear()
    future.set_result(LoadDone(store_s=0.5, write_s=0.25, written_bytes=7, is_off=True))
    answer(engine, "last", prompt_of(10, 9))
    counts = engine.tiers.take_stats()
    assert (counts.store_s, counts.disk_write_s, counts.disk_written_bytes) == (0.5, 0.25, 7)
    assert engine.tiers.stores.disk_is_off


def test_entries_that_a_worker_could_not_write_are_not_looked_up() -> None:
    """Catches entries that stay indexed without a file, so that requests wait for loads that must fail."""
    engine = TieredEngine(num_blocks=12, num_files=100, waits=True)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    engine.now = 2.0
    answer(engine, "next", prompt_of(9, 9))
    ((_, future),) = engine.copier.loads
    engine.copier.loads.clear()
    future.set_result(LoadDone(lost_writes=[*engine.copier.files]))
    answer(engine, "last", prompt_of(10, 9))
    assert answer(engine, "again", prompt_of(0, 21)) == 0
    assert engine.tiers.take_stats().num_lost_writes > 20
    engine.check_tiers()


def test_without_a_tier_the_prefix_is_lost() -> None:
    engine = TieredEngine(num_blocks=12, num_host=1)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    assert answer(engine, "again", prompt_of(0, 21)) == 0


@pytest.mark.parametrize("layout", ["state", "state and window", "states alone"])
@pytest.mark.parametrize("tier", ["num_host", "num_files"])
def test_pages_and_states_come_back_together(tier: str, layout: str) -> None:
    limits = {"num_blocks": 40, "num_slots": 2, "layout": layout, tier: 100}
    engine = TieredEngine(**limits)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1, 12)
    assert engine.kv.lookup(engine.seen[0]).num_tokens == 0, "the checkpoint was evicted"
    request = engine.add("again", prompt_of(0, 21), 3)
    engine.run()
    assert request.num_cached == 20
    assert (request.num_from_host, request.num_from_disk) == ((20, 0) if tier == "num_host" else (0, 20))
    assert engine.outputs["again"] == continuation(prompt_of(0, 21), 3)
    engine.check_empty()
    engine.check_tiers()


def test_states_that_cannot_be_read_are_computed_again() -> None:
    engine = TieredEngine(num_blocks=40, num_slots=2, layout="state", num_files=100, waits=True)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1, 12)
    request = engine.add("again", prompt_of(0, 21), 3)
    engine.step(0.0)
    ((load, _),) = engine.copier.loads
    engine.copier.finish(0, lost=len(load.keys) - 1)
    engine.run()
    assert request.num_cached == 0, "pages are of no use without states"
    assert engine.outputs["again"] == continuation(prompt_of(0, 21), 3)
    engine.check_tiers()


def test_blocks_are_stored_before_they_are_evicted() -> None:
    """Catches an eviction that makes a step wait for a copy, although the block was free for many steps."""
    engine = TieredEngine(num_blocks=60, num_host=100, max_num_batched_tokens=64)
    for number in range(12):
        answer(engine, f"{number}", prompt_of(number, 21), count=20)
    assert engine.copier.num_ahead > 30
    assert answer(engine, "again", prompt_of(0, 21)) == 20
    engine.check_tiers()


def test_blocks_of_running_requests_are_stored_while_few_are_free() -> None:
    """Catches blocks that are evicted as soon as they are free, so that a step waits for their copies."""
    engine = TieredEngine(num_blocks=12, num_host=100)
    engine.add("first", prompt_of(0, 37), 8)
    for _ in range(4):
        engine.step(0.0)
    assert len(engine.outputs["first"]) < 8 and engine.copier.num_ahead == 9
    engine.run()
    assert answer(engine, "other", prompt_of(1, 37)) == 0
    assert answer(engine, "again", prompt_of(0, 37)) == 36
    engine.check_tiers()


def test_others_run_while_a_request_waits_for_its_blocks() -> None:
    engine = TieredEngine(num_blocks=16, num_host=100, waits=True)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    engine.add("again", prompt_of(0, 21), 3)
    engine.step(0.0)
    assert len(engine.copier.loads) == 1
    engine.add("other", prompt_of(9, 9), 5)
    for _ in range(8):
        engine.step(0.0)
    assert engine.reasons["other"] == "length" and engine.outputs["again"] == []
    engine.finish_all()
    engine.run()
    assert engine.outputs["again"] == continuation(prompt_of(0, 21), 3)
    engine.check_empty()


def test_blocks_of_an_aborted_request_are_kept_until_their_copy_ends() -> None:
    engine = TieredEngine(num_blocks=12, num_host=100, waits=True)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    engine.add("again", prompt_of(0, 21), 3)
    engine.step(0.0)
    assert engine.abort("again")
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable - 5
    engine.step(0.0)
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable - 5, "the copy is still under way"
    engine.finish_all()
    engine.run()
    engine.check_empty()
    engine.check_tiers()
    assert answer(engine, "later", prompt_of(0, 21)) == 20, "the blocks have arrived all the same"


def test_a_block_that_cannot_be_read_is_a_miss() -> None:
    engine = TieredEngine(num_blocks=12, num_files=100, waits=True)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    request = engine.add("again", prompt_of(0, 21), 3)
    engine.step(0.0)
    engine.copier.finish(0, lost=2)
    engine.run()
    assert request.num_cached == 8, "the prefix ends before the lost block"
    assert engine.outputs["again"] == continuation(prompt_of(0, 21), 3)
    engine.check_tiers()


def test_salted_blocks_are_not_written_to_disk() -> None:
    for salted in (False, True):
        engine = TieredEngine(num_blocks=12, num_files=100, salted=salted)
        answer(engine, "first", prompt_of(0, 21), cache_salt="secret")
        assert bool(engine.copier.files) is salted
        fill(engine, 1)
        assert answer(engine, "again", prompt_of(0, 21), cache_salt="secret") == (20 if salted else 0)
        assert answer(engine, "bare", prompt_of(0, 21)) == 0


def test_files_are_bounded_and_the_least_recently_used_are_deleted() -> None:
    engine = TieredEngine(num_blocks=12, num_files=14)
    answer(engine, "first", prompt_of(0, 21))
    for number in range(1, 6):
        fill(engine, number, 1)
        assert answer(engine, f"again{number}", prompt_of(0, 21)) == 20, "it is used again and again"
    assert answer(engine, "old", prompt_of(1, 30)) < 28, "while others are deleted"
    engine.check_tiers()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_reason_of_a_miss_names_the_last_tier_of_an_evicted_block(tier: str) -> None:
    engine = TieredEngine(num_blocks=12, num_host=14 * (tier == "host"), num_files=14 * (tier == "disk"))
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    assert answer(engine, "again", prompt_of(0, 21)) < 20
    miss = next(run.miss for step in engine.steps for id, run in step.admitted.items() if id == "again")
    assert miss is not None and (miss.reason, miss.tier) == ("evicted", tier)


def test_full_blocks_are_written_when_no_request_is_left() -> None:
    engine = TieredEngine(num_blocks=32, num_files=100)
    answer(engine, "first", prompt_of(0, 21), count=8)
    assert len(engine.copier.files) == 28 // 4
    assert not engine.core.has_work


def test_a_failed_step_leaves_no_entry() -> None:
    engine = TieredEngine(num_blocks=12, num_host=100, num_files=100)
    answer(engine, "first", prompt_of(0, 21))
    engine.add("second", prompt_of(1, 30), 3)
    plan = engine.scheduler.plan()
    assert plan is not None and plan.stores is not None and any(plan.stores.slots)
    engine.scheduler.fail(plan)
    pages = engine.tiers.stores.pages
    assert pages is not None and pages.host is not None and not len(pages.host), "the step may not have run"
    engine.run()
    assert engine.outputs["second"] == continuation(prompt_of(1, 30), 3)
    engine.check_tiers()


@pytest.mark.parametrize("num_host", [0, 100])
def test_preempted_requests_come_back_from_host_memory(
    num_host: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a tier, as in an engine that only exchanges prefixes with others, they are computed again."""
    limits = {"num_blocks": 14, "max_num_batched_tokens": 64, "reserve_full_prompt": False}
    engine = TieredEngine(num_host=num_host, **limits)
    for number in range(4):
        engine.add(f"{number}", prompt_of(number, 9), 24)
    engine.run()
    assert engine.scheduler.num_preemptions and bool(engine.copier.num_loaded) == bool(num_host)
    assert f"PreemptionMode.{'SWAP' if num_host else 'RECOMPUTE'}" in caplog.text
    for number in range(4):
        assert engine.outputs[f"{number}"] == continuation(prompt_of(number, 9), 24)
    engine.check_empty()
    engine.check_tiers()


def test_blocks_are_filled_after_their_old_contents_are_stored() -> None:
    """Catches a copy that starts before the step that stores what the blocks hold."""
    engine = TieredEngine(num_blocks=20, num_host=100, waits=True, depth=2, lazy=True)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    engine.add("busy", prompt_of(20, 5), 40)
    for _ in range(4):
        engine.step(0.0)
    engine.add("again", prompt_of(0, 21), 3)
    for _ in range(6):
        engine.step(0.0)
    assert len(engine.copier.loads) == 1
    engine.finish_all()
    engine.run()
    assert engine.outputs["again"] == continuation(prompt_of(0, 21), 3)
    assert engine.outputs["busy"] == continuation(prompt_of(20, 5), 40)
    engine.check_tiers()


def test_a_block_of_a_step_in_flight_is_not_stored() -> None:
    """A file outlives the failure of the step that should have filled the block."""
    engine = TieredEngine(num_blocks=8, num_host=100, num_files=100, depth=2, lazy=True)
    engine.add("gone", prompt_of(0, 21), 3)
    assert engine.scheduler.plan() is not None
    engine.abort("gone")
    engine.add("next", prompt_of(1, 25), 1)
    plan = engine.scheduler.plan()
    assert plan is not None and plan.stores is None


def test_waiting_requests_give_way_to_running_ones() -> None:
    engine = TieredEngine(num_blocks=13, num_host=100, waits=True, max_num_seqs=1)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    engine.add("again", prompt_of(0, 21), 3)
    engine.step(0.0)
    engine.add("busy", prompt_of(20, 5), 30)
    engine.step(0.0)
    engine.finish_all()
    engine.run()
    assert engine.scheduler.num_preemptions == 0, "the blocks of the waiting request were enough"
    assert engine.outputs["again"] == continuation(prompt_of(0, 21), 3)
    engine.check_empty()


def test_waiting_requests_give_way_to_the_first_in_line() -> None:
    """Catches a deadlock: nothing runs, and the first request does not fit beside loaded blocks."""
    engine = TieredEngine(num_blocks=13, num_host=100, waits=True, max_num_seqs=1, policy="priority")
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    engine.add("again", prompt_of(0, 21), 3, priority=1)
    engine.step(0.0)
    engine.add("busy", prompt_of(20, 5), 3)
    engine.step(0.0)
    engine.finish_all()
    engine.add("big", prompt_of(21, 33), 3)
    engine.run(max_steps=200)
    assert {*engine.reasons.values()} == {"length"}
    engine.check_empty()


@pytest.mark.parametrize("tier", ["num_host", "num_files"])
def test_a_reset_empties_lower_tiers_only_if_asked(tier: str) -> None:
    engine = TieredEngine(num_blocks=12, **{tier: 100})
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    assert engine.kv.reset()
    assert answer(engine, "again", prompt_of(0, 21)) == 20
    assert engine.kv.reset(external=True)
    assert answer(engine, "after", prompt_of(0, 21)) == 0
    engine.check_tiers()


def test_nothing_is_written_to_disk_after_the_weights_have_changed(caplog: pytest.LogCaptureFixture) -> None:
    engine = TieredEngine(num_blocks=12, num_files=100)
    tiers = engine.kv.tiers
    assert tiers is not None
    engine.kv.reset(external=True)
    tiers.weights_changed()
    tiers.weights_changed()
    assert caplog.text.count("not written to disk until a restart") == 1
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    assert answer(engine, "again", prompt_of(0, 21)) == 0


def test_a_reset_of_the_prefix_cache_waits_for_copies() -> None:
    engine = TieredEngine(num_blocks=12, num_host=100)
    answer(engine, "first", prompt_of(0, 21))
    fill(engine, 1)
    request = engine.add("again", prompt_of(0, 21), 3)
    assert engine.scheduler.plan() is None, "it waits for its blocks"
    engine.abort(request.id)
    assert engine.core.reset_prefix_cache() and not engine.kv.pool.index


@dataclass(frozen=True)
class Event:
    kind: str
    family: int
    length: int
    count: int


EVENTS = st.lists(
    st.builds(
        Event,
        kind=st.sampled_from([*["add", "step", "finish"] * 3, "lose", "lose file", "abort", "fail", "reset"]),
        family=st.integers(0, 3),
        length=st.integers(1, 30),
        count=st.integers(1, 10),
    ),
    min_size=15,
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(
    EVENTS,
    st.fixed_dictionaries(
        {
            "layout": st.sampled_from(
                ["full", "full and window", "window", "latent", "state", "state and window", "states alone"]
            ),
            "num_slots": st.sampled_from([1, 2, 4]),
            "interval": st.sampled_from([0, 8, None]),
            "num_blocks": st.integers(13, 24),
            "num_host": st.sampled_from([0, 3, 20, 200]),
            "num_files": st.sampled_from([0, 3, 20, 200]),
            "max_num_seqs": st.integers(1, 4),
            "max_num_batched_tokens": st.sampled_from([8, 32]),
            "depth": st.sampled_from([1, 2]),
            "lazy": st.booleans(),
            "reserve_full_prompt": st.booleans(),
            "drafts": st.sampled_from([None, "host"]),
        }
    ).map(lambda limits: widened(limits, 40)),
)
def test_any_interleaving_of_copies_ends_with_all_blocks_accounted_for(
    events: list[Event], limits: dict[str, int]
) -> None:
    engine = TieredEngine(waits=True, **limits)
    prompts: dict[str, tuple[list[int], int]] = {}
    for number, event in enumerate(events):
        loads = engine.copier.loads
        match event.kind:
            case "add":
                prompts[f"{number}"] = prompt_of(event.family, event.length), event.count
                hints = CacheHints(300, f"{event.count % 3}") if event.length % 2 else None
                engine.add(f"{number}", *prompts[f"{number}"], hints=hints)
            case "step":
                for _ in range(event.count):
                    if engine.core.has_work:
                        engine.step(0.0)
            case "finish" if loads:
                engine.copier.finish(event.length % len(loads))
            case "lose" if loads:
                engine.copier.finish(event.length % len(loads), lost=event.count % len(loads[0][0].keys))
            case "lose file":
                engine.lose_file(event.length)
            case "abort" if prompts:
                engine.abort([*prompts][event.length % len(prompts)])
            case "fail" if engine.scheduler.in_flight and engine.device.is_quiet:
                engine.core.step_queue.clear()
                engine.scheduler.discard_in_flight()
                engine.scheduler.requeue_running()
            case "reset" if not loads:
                engine.core.reset_prefix_cache()
    for _ in range(3000):
        if not engine.core.has_work:
            break
        engine.finish_all()
        engine.step(0.0)
    engine.check_empty()
    engine.check_tiers()
    for id, (prompt, count) in prompts.items():
        if engine.reasons[id] == "length":
            assert engine.outputs[id] == continuation(prompt, count)
        else:
            assert engine.reasons[id] == "abort"


@given(st.lists(st.tuples(st.sampled_from("acxpur"), st.integers(0, 9)), max_size=80))
def test_slots_of_an_index_are_never_shared_nor_lost(events: list[tuple[str, int]]) -> None:
    index, coming, pinned = TierIndex(4), dict[bytes, int](), list[bytes]()
    slots: dict[bytes, int] = {}
    for kind, number in events:
        key = bytes([number])
        if kind == "a" and key not in index:
            allotted = index.allot(key)
            if allotted is None:
                assert len({*pinned}) + len(coming) == 4, "there was a slot"
                continue
            coming[key] = allotted[0]
            if allotted[1] is not None:
                assert slots.pop(allotted[1]) == allotted[0] and allotted[1] not in pinned
        elif kind in "cx" and key in coming:
            slot = coming.pop(key)
            if kind == "c":
                index.commit(key)
                slots[key] = slot
            else:
                index.cancel(key)
        elif kind == "p" and key in slots:
            index.pin(key)
            pinned.append(key)
        elif kind == "u" and key in pinned:
            index.unpin(key)
            pinned.remove(key)
        elif kind == "r" and index.remove(key):
            assert key not in pinned
            del slots[key]
        taken = [*slots.values(), *coming.values()]
        assert len(taken) == len({*taken}) <= 4 and len(index) == len(slots)
        assert all(index.find(key) == slot for key, slot in slots.items())
