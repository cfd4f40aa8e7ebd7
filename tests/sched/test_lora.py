"""Requests that wait for an adapter, and adapters that wait for a slot."""

import random
from typing import Any

import pytest
from library import Library, digest, lora
from symbolic import Engine, SymbolicWorker, continuation

from quire.data.lora import LoRARequest
from quire.data.plan import StepPlan, StepResult
from quire.data.stats import StepStats
from quire.errors import EngineError, RequestError
from quire.sched.lora import READ_S, TURN_S, LoRAScheduler

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


class Room(Engine):
    """An engine whose requests may have adapters, with a clock that is turned by hand."""

    def __init__(self, *, max_loras: int, max_cpu: int = 0, at_once: bool = True, **limits: Any) -> None:
        self.now = 0.0
        self.library = Library(at_once=at_once)
        self.gate = LoRAScheduler(
            self.library, max_slots=max_loras, max_read=max_cpu or max_loras, clock=lambda: self.now
        )
        super().__init__(adapters=self.gate, **limits)
        self.worker.host = self.library.host

    def ask(self, id: str, adapter: LoRARequest | None, count: int = 4) -> None:
        self.add(id, PROMPT, count, lora=adapter)

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        running = [request for request in self.scheduler.running.requests if request is not None]
        adapters = {request.adapter_digest for request in running if request.lora is not None}
        assert len(adapters) <= len(self.gate.slots), "more adapters in a step than there are slots"

    def is_right(self, id: str, content: str | None, count: int = 4) -> bool:
        found = continuation(PROMPT, count, b"" if content is None else digest(content))
        return self.outputs[id] == found

    def check_left(self) -> None:
        self.check_empty()
        assert all(not slot.num_rows and slot.next is None for slot in self.gate.slots)
        assert not self.gate.running_names and not self.gate.waiting_names and not self.gate._by_request


def test_who_waits_for_its_adapter_is_passed_by_and_read_is_what_was_asked_for() -> None:
    room = Room(max_loras=2, at_once=False)
    room.ask("a", lora("one"))
    room.ask("b", None)
    room.step()
    assert room.outputs["b"] and not room.outputs["a"]
    assert room.gate.waiting_names == ["one"] and room.gate.running_names == []
    stats = room.core.refresh(StepStats())
    assert (stats.num_waiting, stats.num_deferred, stats.waiting_adapters) == (1, 1, ["one"])
    room.library.bring()
    room.step()
    assert room.outputs["a"] and room.gate.running_names == ["one"]
    room.run()
    assert room.is_right("a", "/adapters/one") and room.is_right("b", None)
    assert room.library.names == ["one"]
    room.check_left()


@pytest.mark.parametrize("error", [RequestError("No adapter found for /x"), EngineError("no memory")])
def test_an_adapter_that_cannot_be_read_ends_its_requests_alone(error: Exception) -> None:
    room = Room(max_loras=2, at_once=False)
    for id in ("a", "b"):
        room.ask(id, lora("wrong"))
    room.ask("c", lora("right"))
    room.library.bring(error)
    ended = room.step().finished
    assert {id: finish.reason for id, finish in ended.items()} == {"a": "error", "b": "error"}
    told = "Loading lora wrong failed: No adapter found for /x"
    assert ended["a"].stop_reason == (told if isinstance(error, RequestError) else None)
    room.library.bring()
    room.run()
    assert room.is_right("c", "/adapters/right")
    room.ask("again", lora("wrong"))
    room.library.bring()
    room.run()
    assert room.is_right("again", "/adapters/wrong"), "an error is not kept"
    room.check_left()


def test_aborted_while_its_adapter_is_read() -> None:
    room = Room(max_loras=1, at_once=False)
    for id, name in (("a", "one"), ("b", "two"), ("c", "three"), ("d", "two")):
        room.ask(id, lora(name))
    for id in ("a", "c", "b"):
        assert room.abort(id)
    room.library.bring()
    room.scheduler.settle()
    assert room.library.names == ["one", "two"], "nobody waits for the third"
    room.library.bring()
    room.run()
    assert room.is_right("d", "/adapters/two") and room.gate.names == ["two"]
    room.check_left()


def test_two_names_of_one_content_share_prefixes_and_another_content_does_not() -> None:
    room = Room(max_loras=3)
    room.library.contents = {"/a": "same", "/b": "same", "/c": "other"}
    cached = {}
    for name in "abc":
        room.ask(name, lora(name, f"/{name}"))
        room.run()
        cached[name] = room.seen[-1].num_cached
    room.ask("plain", None)
    room.run()
    assert cached == {"a": 0, "b": 8, "c": 0} and room.seen[-1].num_cached == 0


def test_read_again_the_new_content_is_for_those_who_come_and_the_old_for_those_who_run() -> None:
    room = Room(max_loras=2, max_cpu=4)
    room.ask("old", lora("x"), count=9)
    room.step()
    room.library.contents["/adapters/x"] = "new"
    for id in ("new", "too"):
        room.ask(id, lora("x", load_inplace=True))
    room.ask("plain", lora("x"))
    room.run()
    assert room.is_right("old", "/adapters/x", 9)
    assert all(room.is_right(id, "new") for id in ("new", "too", "plain"))
    assert len(room.library.asked) == 2 and room.seen[1].num_cached == 0
    room.check_left()


def test_what_is_read_again_is_not_what_others_wait_for() -> None:
    """Who has it read again gets what was read long ago, because somebody waits for a slot with that."""
    room = Room(max_loras=1, max_cpu=4)
    room.ask("before", lora("x"))
    room.run()
    room.ask("other", lora("y"), 9)
    room.step()
    room.ask("waits", lora("x"))
    room.step()
    room.library.contents["/adapters/x"] = "new"
    room.ask("new", lora("x", load_inplace=True))
    room.ask("too", lora("x", load_inplace=True))
    room.run()
    assert (
        room.is_right("waits", "/adapters/x") and room.is_right("new", "new") and room.is_right("too", "new")
    )
    assert room.library.names[:2] == ["x", "y"] and len(room.library.names) == 3


def test_an_adapter_that_is_never_read_is_waited_for_so_long_and_no_longer() -> None:
    """Requests that hang for ever behind a disk that does not answer."""
    room = Room(max_loras=2, at_once=False)
    room.ask("a", lora("stuck"))
    room.ask("b", None)
    room.step()
    room.now = READ_S
    ended = room.step().finished
    assert ended["a"].stop_reason == "Loading lora stuck failed: it was not read within 600 s"
    assert not room.gate.is_reading
    room.run()
    assert room.is_right("b", None)
    room.check_left()


def test_what_cannot_be_read_again_stays_as_it_was() -> None:
    room = Room(max_loras=2, max_cpu=4)
    room.ask("a", lora("x"))
    room.run()
    room.library.at_once = False
    room.ask("b", lora("x", load_inplace=True))
    room.library.bring(RequestError("half of it is there"))
    room.run()
    room.ask("c", lora("x"))
    room.run()
    assert room.reasons["b"] == "error" and room.is_right("c", "/adapters/x") and not room.library.open


def test_a_name_like_those_that_versions_have_is_no_version() -> None:
    room = Room(max_loras=2, max_cpu=40)
    for name in ("x", *(f"x#{number}" for number in range(30))):
        room.ask(name, lora(name))
    room.run()
    room.ask("again", lora("x", load_inplace=True))
    room.run()
    assert len(room.library.host) == 32 and all(each == "length" for each in room.reasons.values())


def test_the_name_of_another_place_is_another_adapter() -> None:
    room = Room(max_loras=2)
    room.ask("a", lora("x", "/here"))
    room.ask("b", lora("x", "/there"))
    room.run()
    assert room.is_right("a", "/here") and room.is_right("b", "/there")


def test_an_adapter_goes_when_nobody_uses_it() -> None:
    room = Room(max_loras=2)
    room.ask("a", lora("x"))
    room.step()
    assert room.gate.retire("x") and not room.gate.sweep("x") and room.gate.names == ["x"]
    room.run()
    assert room.gate.sweep("x") and room.gate.names == [] and room.library.host == {}
    assert not room.gate.retire("x")
    room.ask("b", lora("x"))
    room.run()
    assert room.is_right("b", "/adapters/x") and room.library.names == ["x", "x"]


def test_slots_are_filled_once_and_again_when_they_were_lost() -> None:
    room = Room(max_loras=1, max_cpu=2)
    for id, name in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "one")):
        room.ask(id, lora(name))
        room.run()
    room.core.scheduler.send_back()
    room.ask("e", lora("one"))
    room.run()
    room.gate.forget_all()
    assert room.library.host == {}
    room.ask("f", lora("one"))
    room.run()
    puts = [put.adapter.lora_name for plan in room.plans for put in plan.adapters]
    assert puts == ["one", "two", "one", "one", "one"]
    assert room.library.names == ["one", "two", "one"], "host memory keeps both"
    assert all(room.is_right(id, "/adapters/one") for id in "abdef")


def test_a_thousand_held_requests_are_looked_at_when_a_gate_opens_not_in_every_step() -> None:
    room = Room(max_loras=1, max_num_seqs=2)
    room.ask("first", lora("one"), count=50)
    for number in range(1000):
        room.ask(f"held{number}", lora("two"))
    looks = 0
    holds = room.gate.holds

    def counted(request: Any, **how: Any) -> bool:
        nonlocal looks
        looks += 1
        return holds(request, **how)

    room.gate.holds = counted  # type: ignore[method-assign]
    for _ in range(40):
        room.step()
    assert looks < 5000


class Poisoned(SymbolicWorker):
    """Fails whenever a certain adapter takes part."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if any(self.rows[row].digest == digest("poison") for row in plan.rows.tolist()):
            raise RuntimeError("no")
        return result


@pytest.mark.parametrize("lazy", [False, True])
def test_a_step_that_fails_loses_its_slots_and_ends_who_is_at_fault(lazy: bool) -> None:
    room = Room(max_loras=2, max_cpu=4, depth=2, lazy=lazy)
    worker = room.use(Poisoned)
    worker.host = room.library.host
    room.library.contents["/p"] = "poison"
    for number in range(6):
        room.ask(f"r{number}", lora("p", "/p") if number == 3 else lora(f"x{number % 3}"), count=6)
    room.run()
    assert room.reasons.pop("r3") == "error" and set(room.reasons.values()) == {"length"}
    assert all(room.is_right(f"r{n}", f"/adapters/x{n % 3}", 6) for n in range(6) if n != 3)
    room.check_left()


@pytest.mark.parametrize("slots", [1, 3])
def test_nobody_starves_behind_adapters_that_always_have_rows(slots: int) -> None:
    """Forty adapters wait; others, as many as there are slots, get a new request in every step."""
    room = Room(max_loras=slots, max_num_seqs=16, max_num_batched_tokens=64, num_blocks=400)
    rare = {f"rare{number}" for number in range(40)}
    for name in sorted(rare):
        room.ask(name, lora(name))
    for step in range(40 * 14 // slots):
        room.ask(f"hot{step}", lora(f"hot{step % slots}"), count=6)
        room.now += TURN_S / 5
        room.step()
        if rare <= room.reasons.keys():
            break
    assert rare <= room.reasons.keys()
    room.run()
    assert set(room.reasons.values()) == {"length"}
    room.check_left()


@pytest.mark.parametrize("seed", range(6))
def test_any_traffic(seed: int) -> None:
    """What each request says is what it says alone, whatever is read late, fails, ends early or is preempted;
    in every step the invariants of `check`, and what is in a slot is what its rows were promised."""
    rng = random.Random(seed)
    depth = rng.choice([1, 2, 3])
    room = Room(
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
            room.add(id, PROMPT, count, lora=None if name is None else lora(name), **fields)
            wanted[id] = name, count
        if (
            not room.library.at_once
            and rng.random() < 0.5
            and any(not f.done() for _, f in room.library.asked)
        ):
            fails = rng.random() < 0.1
            first = next(asked for asked, future in room.library.asked if not future.done())
            broken |= {first.lora_name.partition("#")[0]} if fails else set()
            room.library.bring(RequestError("torn") if fails else None)
        if rng.random() < 0.1 and wanted:
            room.abort(rng.choice(list(wanted)))
        if rng.random() < 0.02:
            while room.scheduler.in_flight:
                room.step()
            room.core.scheduler.send_back()
        room.now += rng.random() * TURN_S
        room.step(timeout_s=0.0)
    while room.library.open or room.core.has_work:
        if room.library.open:
            room.library.bring()
        room.now += TURN_S / 3
        room.step(timeout_s=0.0)
    for id, (name, count) in wanted.items():
        reason, content = room.reasons[id], None if name is None else f"/adapters/{name}"
        assert reason in ("length", "abort") or (reason == "error" and name in broken), (id, reason)
        if reason == "length":
            assert room.is_right(id, content, count)
    assert room.library.most <= max(room.gate._max_read, len(room.gate.slots) + 1)
    room.check_left()
