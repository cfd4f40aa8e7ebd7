"""Tests of requests that wait for a LoRA adapter, and adapters that wait for a slot."""

import random
from typing import Any

import pytest
from library import FakeLoader, digest, lora
from symbolic import Engine, SymbolicWorker, continuation

from quire.data.lora import LoRARequest
from quire.data.stats import StepStats
from quire.data.step_plan import StepPlan, StepResult
from quire.errors import EngineError, RequestError
from quire.sched.lora import READ_S, TURN_S, LoRAScheduler

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


class LoRAEngine(Engine):
    """An engine whose requests may have adapters, with a manual clock."""

    def __init__(self, *, max_loras: int, max_cpu: int = 0, at_once: bool = True, **limits: Any) -> None:
        self.now = 0.0
        self.library = FakeLoader(at_once=at_once)
        self.lora_scheduler = LoRAScheduler(
            self.library, max_slots=max_loras, max_read=max_cpu or max_loras, clock=lambda: self.now
        )
        super().__init__(adapters=self.lora_scheduler, **limits)
        self.worker.host = self.library.host

    def add_lora(self, id: str, adapter: LoRARequest | None, count: int = 4) -> None:
        self.add(id, PROMPT, count, lora=adapter)

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        running = [request for request in self.scheduler.running.requests if request is not None]
        adapters = {request.adapter_digest for request in running if request.lora is not None}
        assert len(adapters) <= len(self.lora_scheduler.slots), "more adapters in a step than there are slots"

    def is_right(self, id: str, content: str | None, count: int = 4) -> bool:
        expected = continuation(PROMPT, count, b"" if content is None else digest(content))
        return self.outputs[id] == expected

    def check_drained(self) -> None:
        self.check_empty()
        assert all(not slot.num_rows and slot.next is None for slot in self.lora_scheduler.slots)
        assert (
            not self.lora_scheduler.running_names
            and not self.lora_scheduler.waiting_names
            and not self.lora_scheduler._by_request
        )


def test_request_waiting_for_its_adapter_is_skipped() -> None:
    engine = LoRAEngine(max_loras=2, at_once=False)
    engine.add_lora("a", lora("one"))
    engine.add_lora("b", None)
    engine.step()
    assert engine.outputs["b"] and not engine.outputs["a"]
    assert engine.lora_scheduler.waiting_names == ["one"] and engine.lora_scheduler.running_names == []
    stats = engine.core.refresh(StepStats())
    assert (stats.num_waiting, stats.num_deferred, stats.waiting_adapters) == (1, 1, ["one"])
    engine.library.complete_next()
    engine.step()
    assert engine.outputs["a"] and engine.lora_scheduler.running_names == ["one"]
    engine.run()
    assert engine.is_right("a", "/adapters/one") and engine.is_right("b", None)
    assert engine.library.names == ["one"]
    engine.check_drained()


@pytest.mark.parametrize("error", [RequestError("No adapter found for /x"), EngineError("no memory")])
def test_unreadable_adapter_fails_only_its_requests(error: Exception) -> None:
    engine = LoRAEngine(max_loras=2, at_once=False)
    for id in ("a", "b"):
        engine.add_lora(id, lora("wrong"))
    engine.add_lora("c", lora("right"))
    engine.library.complete_next(error)
    ended = engine.step().finished
    assert {id: finish.reason for id, finish in ended.items()} == {"a": "error", "b": "error"}
    reason = "Loading lora wrong failed: No adapter found for /x"
    assert ended["a"].stop_reason == (reason if isinstance(error, RequestError) else None)
    engine.library.complete_next()
    engine.run()
    assert engine.is_right("c", "/adapters/right")
    engine.add_lora("again", lora("wrong"))
    engine.library.complete_next()
    engine.run()
    assert engine.is_right("again", "/adapters/wrong"), "an error is not cached"
    engine.check_drained()


def test_abort_while_adapter_is_loading() -> None:
    engine = LoRAEngine(max_loras=1, at_once=False)
    for id, name in (("a", "one"), ("b", "two"), ("c", "three"), ("d", "two")):
        engine.add_lora(id, lora(name))
    for id in ("a", "c", "b"):
        assert engine.abort(id)
    engine.library.complete_next()
    engine.scheduler.settle()
    assert engine.library.names == ["one", "two"], "no request waits for the third"
    engine.library.complete_next()
    engine.run()
    assert engine.is_right("d", "/adapters/two") and engine.lora_scheduler.names == ["two"]
    engine.check_drained()


def test_prefix_cache_is_shared_by_adapter_content() -> None:
    engine = LoRAEngine(max_loras=3)
    engine.library.contents = {"/a": "same", "/b": "same", "/c": "other"}
    cached = {}
    for name in "abc":
        engine.add_lora(name, lora(name, f"/{name}"))
        engine.run()
        cached[name] = engine.seen[-1].num_cached
    engine.add_lora("plain", None)
    engine.run()
    assert cached == {"a": 0, "b": 8, "c": 0} and engine.seen[-1].num_cached == 0


def test_inplace_reload_serves_new_requests_and_keeps_running_ones() -> None:
    engine = LoRAEngine(max_loras=2, max_cpu=4)
    engine.add_lora("old", lora("x"), count=9)
    engine.step()
    engine.library.contents["/adapters/x"] = "new"
    for id in ("new", "too"):
        engine.add_lora(id, lora("x", load_inplace=True))
    engine.add_lora("plain", lora("x"))
    engine.run()
    assert engine.is_right("old", "/adapters/x", 9)
    assert all(engine.is_right(id, "new") for id in ("new", "too", "plain"))
    assert len(engine.library.requested) == 2 and engine.seen[1].num_cached == 0
    engine.check_drained()


def test_inplace_reload_while_old_version_waits_for_slot() -> None:
    """Check that requests for the reload get the new version while a request still waits for the old one."""
    engine = LoRAEngine(max_loras=1, max_cpu=4)
    engine.add_lora("before", lora("x"))
    engine.run()
    engine.add_lora("other", lora("y"), 9)
    engine.step()
    engine.add_lora("waits", lora("x"))
    engine.step()
    engine.library.contents["/adapters/x"] = "new"
    engine.add_lora("new", lora("x", load_inplace=True))
    engine.add_lora("too", lora("x", load_inplace=True))
    engine.run()
    assert (
        engine.is_right("waits", "/adapters/x")
        and engine.is_right("new", "new")
        and engine.is_right("too", "new")
    )
    assert engine.library.names[:2] == ["x", "y"] and len(engine.library.names) == 3


def test_adapter_load_times_out() -> None:
    """Check that requests do not hang forever on a disk that does not respond."""
    engine = LoRAEngine(max_loras=2, at_once=False)
    engine.add_lora("a", lora("stuck"))
    engine.add_lora("b", None)
    engine.step()
    engine.now = READ_S
    ended = engine.step().finished
    assert ended["a"].stop_reason == "Loading lora stuck failed: it was not read within 600 s"
    assert not engine.lora_scheduler.is_reading
    engine.run()
    assert engine.is_right("b", None)
    engine.check_drained()


def test_failed_reload_keeps_the_old_version() -> None:
    engine = LoRAEngine(max_loras=2, max_cpu=4)
    engine.add_lora("a", lora("x"))
    engine.run()
    engine.library.at_once = False
    engine.add_lora("b", lora("x", load_inplace=True))
    engine.library.complete_next(RequestError("half of it is there"))
    engine.run()
    engine.add_lora("c", lora("x"))
    engine.run()
    assert engine.reasons["b"] == "error" and engine.is_right("c", "/adapters/x") and not engine.library.open


def test_adapter_names_that_look_like_versions_do_not_collide() -> None:
    engine = LoRAEngine(max_loras=2, max_cpu=40)
    for name in ("x", *(f"x#{number}" for number in range(30))):
        engine.add_lora(name, lora(name))
    engine.run()
    engine.add_lora("again", lora("x", load_inplace=True))
    engine.run()
    assert len(engine.library.host) == 32 and all(reason == "length" for reason in engine.reasons.values())


def test_same_name_with_another_path_is_another_adapter() -> None:
    engine = LoRAEngine(max_loras=2)
    engine.add_lora("a", lora("x", "/here"))
    engine.add_lora("b", lora("x", "/there"))
    engine.run()
    assert engine.is_right("a", "/here") and engine.is_right("b", "/there")


def test_adapter_is_unloaded_when_unused() -> None:
    engine = LoRAEngine(max_loras=2)
    engine.add_lora("a", lora("x"))
    engine.step()
    assert (
        engine.lora_scheduler.retire("x")
        and not engine.lora_scheduler.sweep("x")
        and engine.lora_scheduler.names == ["x"]
    )
    engine.run()
    assert (
        engine.lora_scheduler.sweep("x") and engine.lora_scheduler.names == [] and engine.library.host == {}
    )
    assert not engine.lora_scheduler.retire("x")
    engine.add_lora("b", lora("x"))
    engine.run()
    assert engine.is_right("b", "/adapters/x") and engine.library.names == ["x", "x"]


def test_slots_are_refilled_only_after_they_were_lost() -> None:
    engine = LoRAEngine(max_loras=1, max_cpu=2)
    for id, name in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "one")):
        engine.add_lora(id, lora(name))
        engine.run()
    engine.core.scheduler.requeue_running()
    engine.add_lora("e", lora("one"))
    engine.run()
    engine.lora_scheduler.forget_all()
    assert engine.library.host == {}
    engine.add_lora("f", lora("one"))
    engine.run()
    puts = [put.adapter.lora_name for plan in engine.plans for put in plan.adapters]
    assert puts == ["one", "two", "one", "one", "one"]
    assert engine.library.names == ["one", "two", "one"], "host memory keeps both"
    assert all(engine.is_right(id, "/adapters/one") for id in "abdef")


def test_held_requests_are_not_rechecked_in_every_step() -> None:
    engine = LoRAEngine(max_loras=1, max_num_seqs=2)
    engine.add_lora("first", lora("one"), count=50)
    for number in range(1000):
        engine.add_lora(f"held{number}", lora("two"))
    looks = 0
    hold_back = engine.lora_scheduler.hold_back

    def counted(request: Any, **how: Any) -> bool:
        nonlocal looks
        looks += 1
        return hold_back(request, **how)

    engine.lora_scheduler.hold_back = counted  # type: ignore[method-assign]
    for _ in range(40):
        engine.step()
    assert looks < 5000


class PoisonedAdapterWorker(SymbolicWorker):
    """A worker that fails whenever the poisoned adapter is in a step."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if any(self.rows[row].digest == digest("poison") for row in plan.rows.tolist()):
            raise RuntimeError("no")
        return result


@pytest.mark.parametrize("lazy", [False, True])
def test_failed_step_reloads_slots_and_ends_only_faulty_requests(lazy: bool) -> None:
    engine = LoRAEngine(max_loras=2, max_cpu=4, depth=2, lazy=lazy)
    worker = engine.use(PoisonedAdapterWorker)
    worker.host = engine.library.host
    engine.library.contents["/p"] = "poison"
    for number in range(6):
        engine.add_lora(f"r{number}", lora("p", "/p") if number == 3 else lora(f"x{number % 3}"), count=6)
    engine.run()
    assert engine.reasons.pop("r3") == "error" and set(engine.reasons.values()) == {"length"}
    assert all(engine.is_right(f"r{n}", f"/adapters/x{n % 3}", 6) for n in range(6) if n != 3)
    engine.check_drained()


@pytest.mark.parametrize("slots", [1, 3])
def test_requests_do_not_starve_behind_busy_adapters(slots: int) -> None:
    """Check forty waiting adapters while one busy adapter per slot gets a new request in every step."""
    engine = LoRAEngine(max_loras=slots, max_num_seqs=16, max_num_batched_tokens=64, num_blocks=400)
    rare = {f"rare{number}" for number in range(40)}
    for name in sorted(rare):
        engine.add_lora(name, lora(name))
    for step in range(40 * 14 // slots):
        engine.add_lora(f"hot{step}", lora(f"hot{step % slots}"), count=6)
        engine.now += TURN_S / 5
        engine.step()
        if rare <= engine.reasons.keys():
            break
    assert rare <= engine.reasons.keys()
    engine.run()
    assert set(engine.reasons.values()) == {"length"}
    engine.check_drained()


@pytest.mark.parametrize("seed", range(6))
def test_random_lora_traffic(seed: int) -> None:
    """Check that every request's output equals its output alone under late loads, failures, aborts and
    preemption.

    The invariants of `check` hold in every step, and each slot holds the adapter of its rows.
    """
    rng = random.Random(seed)
    depth = rng.choice([1, 2, 3])
    engine = LoRAEngine(
        max_loras=rng.randint(1, 4),
        max_cpu=rng.choice([0, 5, 8]),
        at_once=rng.random() < 0.3,
        depth=depth,
        lazy=depth > 1 and rng.random() < 0.5,
        max_num_seqs=rng.randint(1, 8),
        num_blocks=rng.choice([14, 20, 60]),
        policy=rng.choice(["fcfs", "priority"]),
        fair=rng.random() < 0.3,
        num_stages=rng.choice([1, 1, 2]) if depth > 1 else 1,
        drafts=rng.choice([None, "host", "worker"]),
    )
    broken: set[str] = set()
    wanted: dict[str, tuple[str | None, int]] = {}
    for _ in range(100):
        for _ in range(rng.randint(0, 2)):
            name = None if rng.random() < 0.2 else f"x{min(int(rng.expovariate(0.4)), 9)}"
            id, count = f"r{len(wanted)}", rng.randint(1, 8)
            fields = {"priority": rng.randint(0, 2), "tenant": rng.randint(0, 2)}
            engine.add(id, PROMPT, count, lora=None if name is None else lora(name), **fields)
            wanted[id] = name, count
        if (
            not engine.library.at_once
            and rng.random() < 0.5
            and any(not f.done() for _, f in engine.library.requested)
        ):
            fails = rng.random() < 0.1
            first = next(request for request, future in engine.library.requested if not future.done())
            broken |= {first.lora_name.partition("#")[0]} if fails else set()
            engine.library.complete_next(RequestError("torn") if fails else None)
        if rng.random() < 0.1 and wanted:
            engine.abort(rng.choice(list(wanted)))
        if rng.random() < 0.02:
            while engine.scheduler.in_flight:
                engine.step()
            engine.core.scheduler.requeue_running()
        engine.now += rng.random() * TURN_S
        engine.step(timeout_s=0.0)
    while engine.library.open or engine.core.has_work:
        if engine.library.open:
            engine.library.complete_next()
        engine.now += TURN_S / 3
        engine.step(timeout_s=0.0)
    for id, (name, count) in wanted.items():
        reason, content = engine.reasons[id], None if name is None else f"/adapters/{name}"
        assert reason in ("length", "abort") or (reason == "error" and name in broken), (id, reason)
        if reason == "length":
            assert engine.is_right(id, content, count)
    assert engine.library.most <= max(engine.lora_scheduler._max_read, len(engine.lora_scheduler.slots) + 1)
    engine.check_drained()
