"""What a core is asked beside requests: answered when it is done, in whatever state it is."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from library import Library, digest, lora
from symbolic import Engine, continuation

from quire.core.rpc import CoreRpc
from quire.data.plan import FinishReason, StepPlan
from quire.data.stats import StepStats
from quire.data.wire import ControlCall, Reply
from quire.errors import EngineError, RequestError
from quire.frontend.control import CoreControl
from quire.sched.lora import LoRAScheduler
from quire.sched.mm_receiver_cache import ReceiverCache


class Room:
    """A core over the symbolic worker with its desk, turned by hand."""

    def __init__(self, **limits: Any) -> None:
        self.engine = Engine(**limits)
        self.core = self.engine.core
        self.numbers = itertools.count()
        self.replies: dict[int, Reply] = {}
        self.ended: dict[str, FinishReason] = {}
        self.tokens: dict[str, list[int]] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.results: list[Any] = []
        self.failing: dict[str, Exception] = {}
        """Methods of the workers that fail once."""
        self.core.executor.call = self._call  # type: ignore[method-assign]
        self.receiver_cache = ReceiverCache()
        self.rpc = CoreRpc(
            self.core,
            lambda _, reply: self.replies.update({reply.number: reply}),
            self.end,
            self.receiver_cache,
        )

    def _call(self, method: Any, args: Any = (), kwargs: Any = None, timeout_s: Any = None) -> list[Any]:
        self.calls.append((method, *args))
        if method in self.failing:
            raise self.failing.pop(method)
        return self.results

    def end(self, finished: dict[str, FinishReason]) -> None:
        self.ended |= finished

    def ask(self, method: str, /, **args: Any) -> int:
        number = next(self.numbers)
        self.rpc.ask(b"client", ControlCall(number, method, args))
        return number

    def turn(self) -> None:
        self.rpc.turn()
        if self.core.has_work and not self.rpc.is_busy and (step := self.core.step()) is not None:
            for id, token_id in zip(step.request_ids, step.token_ids, strict=True):
                self.tokens.setdefault(id, []).append(token_id)
            self.ended |= step.finished

    def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(1_000_000):
            if holds():
                return
            self.turn()
        raise AssertionError("it never came to that")

    def answer(self, method: str, /, **args: Any) -> Reply:
        number = self.ask(method, **args)
        self.until(lambda: number in self.replies)
        return self.replies[number]

    def add(self, id: str, count: int = 20) -> None:
        self.engine.add(id, [len(id), 5, 7, 11], count)

    def is_right(self, id: str, count: int = 20) -> bool:
        return self.tokens[id] == continuation([len(id), 5, 7, 11], count)


def operation_of(*rooms: Room) -> CoreControl:
    """The rooms' cores as an API process operates them."""

    async def call_all(method: str, args: dict[str, Any], timeout_s: float | None = None) -> list[Any]:
        replies = [room.answer(method, **args) for room in rooms]
        for reply in replies:
            if reply.error:
                raise (RequestError if reply.is_request else EngineError)(reply.error)
        return [reply.value for reply in replies]

    return CoreControl(call_all, lambda: None, {"model": {"enable_sleep_mode": True}})


def wake_up(*rooms: Room, tags: list[str] | None = None) -> None:
    asyncio.run(operation_of(*rooms).wake_up(tags))


class BusyPeer:
    """Stands in for the lockstep with an engine that always has work."""

    is_called = True

    def agreed(self, plan: StepPlan | None) -> StepPlan:
        return StepPlan.idle(-1) if plan is None else plan


@pytest.fixture(params=[1, 2], ids=["one at a time", "overlapped"])
def room(request: pytest.FixtureRequest) -> Room:
    return Room(depth=request.param, lazy=request.param == 2)


def test_waiting_for_all_to_end_takes_nobody_in(room: Room) -> None:
    room.add("a")
    room.turn()
    number = room.ask("pause", mode="wait")
    room.add("bb")
    assert number not in room.replies and not room.answer("is_paused").value
    room.until(lambda: number in room.replies)
    assert room.is_right("a") and "bb" not in room.tokens
    assert room.answer("is_paused").value and not room.core.has_work
    assert room.core.refresh(StepStats()).num_waiting == 1
    assert not room.answer("resume").error
    room.until(lambda: "bb" in room.ended)
    assert room.is_right("bb")


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_is_confirmed_when_no_step_is_under_way(mode: str) -> None:
    """Catches an operator who changes weights or memory while a step still reads them."""
    room = Room(depth=2, lazy=True)
    room.add("a")
    room.until(lambda: len(room.core.step_queue) > 0)
    number = room.ask("pause", mode=mode)
    room.rpc.turn()
    assert number not in room.replies and len(room.core.step_queue) > 0
    while number not in room.replies:
        room.core.step()
        room.rpc.turn()
    assert not len(room.core.step_queue)


def test_resuming_breaks_off_the_wait(room: Room) -> None:
    room.add("a", 50)
    room.turn()
    number = room.ask("pause", mode="wait")
    room.turn()
    assert not room.answer("resume").error
    room.until(lambda: number in room.replies)
    assert room.replies[number].is_request and "resumed" in room.replies[number].error
    room.until(lambda: "a" in room.ended)
    assert room.is_right("a", 50)


def test_aborting_ends_those_inside_and_outside(room: Room) -> None:
    room.add("a")
    room.until(lambda: "a" in room.tokens)
    room.answer("pause", mode="keep")
    room.add("bb")
    assert not room.ended
    room.answer("pause", mode="abort", clear_cache=True)
    assert {id: finish.reason for id, finish in room.ended.items()} == {"a": "abort", "bb": "abort"}
    assert room.core.scheduler.kv.pool.usage == 0
    room.answer("resume")
    room.add("ccc")
    room.until(lambda: "ccc" in room.ended)
    assert room.is_right("ccc")


@pytest.mark.parametrize("level", [1, 2])
def test_kept_requests_start_again_after_sleep(room: Room, level: int) -> None:
    """Catches a prefix or a block that is taken for filled though the cache is new."""
    for id in ("a", "bb", "ccc"):
        room.add(id)
    room.until(lambda: len(room.tokens.get("a", [])) == 5)
    room.answer("pause", mode="keep")
    assert not room.answer("sleep", level=level).error
    assert room.calls == [("sleep", level)] and room.answer("sleep_level").value == level
    assert room.answer("resume").is_request, "it sleeps"
    worker = room.engine.worker
    worker.cache = [None] * len(worker.cache)
    room.add("dddd")
    wake_up(room, tags=["kv_cache"])
    assert room.answer("sleep_level").value == level and room.core.gate.is_shut
    assert ("warm_up",) not in room.calls
    wake_up(room, tags=["weights"])
    assert room.calls[-2:] == [("wake_up", ["kv_cache", "weights"]), ("warm_up",)]
    room.until(lambda: len(room.ended) == 4)
    assert all(room.is_right(id) for id in ("a", "bb", "ccc", "dddd"))


def test_prefixes_are_forgotten_under_running_requests(room: Room) -> None:
    """Catches requests that end or repeat themselves by it, and one that was paused and runs again."""
    for id in ("a", "bb"):
        room.add(id)
    room.until(lambda: len(room.tokens.get("a", [])) == 5)
    assert room.answer("reset_prefix_cache").value is False
    assert room.answer("reset_running").value is True and room.core.gate.is_open
    room.until(lambda: len(room.tokens["a"]) == 9)
    room.answer("pause", mode="keep")
    assert room.answer("reset_running").value is True and room.core.gate.is_shut
    room.answer("resume")
    room.until(lambda: len(room.ended) == 2)
    assert room.is_right("a") and room.is_right("bb")


def test_prefixes_are_forgotten_while_another_engine_is_busy(room: Room) -> None:
    """Catches a wait for a pipeline that idle steps keep full."""
    room.core.step_queue.lockstep = BusyPeer()  # type: ignore[assignment]
    room.engine.check = lambda plan: None  # type: ignore[method-assign]  # it wants work in all
    room.add("a")
    room.until(lambda: len(room.tokens.get("a", [])) == 5)
    number = room.ask("reset_running")
    for _ in range(5):
        room.turn()
    assert room.replies[number].value is True
    room.until(lambda: "a" in room.ended)
    assert room.is_right("a")


def test_sleep_is_tried_again_after_it_failed() -> None:
    """Catches an engine that takes a failed sleep for sleep, and keeps its memory."""
    rooms = [Room(), Room()]
    rooms[1].failing["sleep"] = MemoryError("no host memory")
    operation = operation_of(*rooms)
    with pytest.raises(EngineError, match="try again, or call wake_up: no host memory"):
        asyncio.run(operation.sleep(2))
    assert asyncio.run(operation.is_sleeping()) and rooms[1].answer("resume").is_request
    asyncio.run(operation.sleep(2))
    assert [room.calls for room in rooms] == [[("sleep", 2)], [("sleep", 2), ("sleep", 2)]]
    asyncio.run(operation.sleep(2))
    assert len(rooms[1].calls) == 2, "it sleeps already"
    wake_up(*rooms)
    assert all(room.core.gate.is_open and not room.core.gate.is_unsure for room in rooms)


def test_what_was_woken_up_alone_sleeps_again(room: Room) -> None:
    operation = operation_of(room)
    asyncio.run(operation.sleep(1))
    wake_up(room, tags=["weights"])
    asyncio.run(operation.sleep(1))
    assert [call[0] for call in room.calls] == ["sleep", "wake_up", "sleep"]


@pytest.mark.parametrize("method", ["wake_up", "warm_up"])
def test_one_that_fails_to_wake_up_leaves_all_asleep(method: str) -> None:
    """Catches one that warms up, where it would wait for the others, or takes steps without them; and
    one that is not asked a second time."""
    rooms = [Room(), Room()]
    for room in rooms:
        room.answer("pause", mode="abort")
        room.answer("sleep", level=1)
        room.calls.clear()
    rooms[1].failing[method] = RuntimeError("no memory")
    with pytest.raises(EngineError, match="no memory"):
        wake_up(*rooms)
    assert (("warm_up",) in rooms[0].calls) == (method == "warm_up")
    assert rooms[1].answer("resume").is_request, "it sleeps"
    assert all(room.core.gate.is_shut and room.answer("sleep_level").value == 1 for room in rooms)
    for room in rooms:
        room.calls.clear()
    wake_up(*rooms)
    expected = [("wake_up", ["kv_cache", "weights"]), ("warm_up",)]
    assert all(room.calls == expected and room.core.gate.is_open for room in rooms)
    assert all(room.answer("sleep_level").value == 0 for room in rooms)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("sleep", {"level": 1}),
        ("pause", {"mode": "x"}),
        ("wake_up", {"tags": ["x"]}),
        ("collective_rpc", {"method": "close"}),
        ("collective_rpc", {"wrong": 1}),
    ],
)
def test_what_cannot_be_answered(room: Room, method: str, args: dict[str, Any]) -> None:
    """That it does not rest, too."""
    assert room.answer(method, **args).is_request and not room.calls


def test_what_workers_return_may_not_be_sendable(room: Room) -> None:
    room.results = [object()]
    assert room.answer("collective_rpc", method="f").is_request
    room.results = [1, {"a": None}]
    assert room.answer("collective_rpc", method="f").value == [1, {"a": None}]


def test_requests_end_by_the_ids_that_users_know(room: Room) -> None:
    for id in ("cmpl-1-0-ab12", "cmpl-1-1-ab13", "2_cmpl-2-ab14", "cmpl-3-ab15"):
        room.add(id)
    assert room.answer("abort", names=["cmpl-1", "cmpl-2", "nobody"]).value == 3
    assert "cmpl-3-ab15" not in room.ended


# ---- adapters


def with_adapters(**limits: Any) -> tuple[Room, Library]:
    library = Library(at_once=False)
    room = Room(adapters=LoRAScheduler(library, max_slots=1, max_read=2), **limits)
    room.engine.worker.host = library.host
    return room, library


def test_an_adapter_is_there_when_it_was_read_or_it_is_said_what_is_wrong_with_it() -> None:
    room, library = with_adapters()
    number = room.ask("add_adapter", lora={"lora_name": "x", "lora_int_id": 1, "lora_path": "/x"})
    room.turn()
    assert number not in room.replies and room.answer("list_adapters").value == []
    library.bring(RequestError("No adapter found for /x"))
    room.until(lambda: number in room.replies)
    assert room.replies[number].is_request and room.replies[number].error == "No adapter found for /x"
    number = room.ask("add_adapter", lora={"lora_name": "x", "lora_int_id": 1, "lora_path": "/x"})
    library.bring()
    room.until(lambda: number in room.replies)
    assert room.replies[number].value.digest == digest("/x")
    assert room.answer("list_adapters").value == ["x"]


def test_an_adapter_stays_until_its_requests_have_ended() -> None:
    room, library = with_adapters()
    room.engine.add("a", [1, 5, 7, 11], 20, lora=lora("x"))
    library.bring()
    room.until(lambda: "a" in room.tokens)
    number = room.ask("remove_adapter", name="x")
    room.turn()
    assert number not in room.replies and library.host
    room.until(lambda: number in room.replies)
    assert room.ended["a"].reason == "length" and room.replies[number].value is True
    assert not library.host and room.answer("list_adapters").value == []
    assert room.answer("remove_adapter", name="x").value is False


@pytest.mark.parametrize("level", [1, 2])
def test_who_wakes_up_has_its_adapter_put_again_and_after_a_deep_sleep_read_again(level: int) -> None:
    room, library = with_adapters()
    room.engine.add("a", [1, 5, 7, 11], 20, lora=lora("x"))
    library.bring()
    room.until(lambda: "a" in room.tokens)
    room.answer("pause", mode="keep")
    assert not room.answer("sleep", level=level).error
    room.engine.worker.slots.clear()
    if level == 2:
        library.host.clear()
    reply = room.answer("add_adapter", lora={"lora_name": "y", "lora_int_id": 1, "lora_path": "/y"})
    assert reply.is_request and "wake it up" in reply.error
    wake_up(room)
    if level == 2:
        room.core.scheduler.settle()
        library.bring()
    room.until(lambda: "a" in room.ended)
    assert room.tokens["a"] == continuation([1, 5, 7, 11], 20, digest("/adapters/x"))
    assert library.names == ["x"] * level


def test_no_one_sleeps_while_an_adapter_is_read() -> None:
    room, library = with_adapters()
    room.engine.add("a", [1, 5, 7, 11], 20, lora=lora("x"))
    number = room.ask("pause", mode="keep")
    room.turn()
    assert number not in room.replies
    library.bring()
    room.until(lambda: number in room.replies)
    assert not room.replies[number].error
