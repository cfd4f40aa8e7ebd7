"""Tests of core RPCs, which are answered when they are done, in any state."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from library import FakeLoader, digest, lora
from symbolic import Engine, continuation

from quire.core.rpc import CoreRpc
from quire.data.stats import StepStats
from quire.data.step_plan import FinishReason, StepPlan
from quire.data.wire import ControlCall, Reply
from quire.errors import EngineError, RequestError
from quire.frontend.control import CoreControl
from quire.sched.lora import LoRAScheduler
from quire.sched.mm_receiver_cache import ReceiverCache


class RpcCore:
    """A core over the symbolic worker with its RPC handler, stepped by hand."""

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
        """Worker methods that fail once."""
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
        self.rpc.submit(b"client", ControlCall(number, method, args))
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


def operation_of(*cores: RpcCore) -> CoreControl:
    """Return the operations of an API process over these cores."""

    async def call_all(
        method: str, args: dict[str, Any], timeout_s: float | None = None, *, if_ready: bool = False
    ) -> list[Any]:
        replies = [core.answer(method, **args) for core in cores]
        for reply in replies:
            if reply.error:
                raise (RequestError if reply.is_request else EngineError)(reply.error)
        return [reply.value for reply in replies]

    return CoreControl(
        call_all,
        settings={"model": {"enable_sleep_mode": True}},
        forget_prefixes=lambda: None,
        clear_media=lambda: None,
    )


def wake_up(*cores: RpcCore, tags: list[str] | None = None) -> None:
    asyncio.run(operation_of(*cores).wake_up(tags))


class BusyPeer:
    """Stands in for lockstep with an engine that always has work."""

    is_called = True

    def join_round(self, plan: StepPlan | None) -> StepPlan:
        return StepPlan.idle(-1) if plan is None else plan


@pytest.fixture(params=[1, 2], ids=["one at a time", "overlapped"])
def core(request: pytest.FixtureRequest) -> RpcCore:
    return RpcCore(depth=request.param, lazy=request.param == 2)


def test_pause_with_wait_admits_no_requests(core: RpcCore) -> None:
    core.add("a")
    core.turn()
    number = core.ask("pause", mode="wait")
    core.add("bb")
    assert number not in core.replies and not core.answer("is_paused").value
    core.until(lambda: number in core.replies)
    assert core.is_right("a") and "bb" not in core.tokens
    assert core.answer("is_paused").value and not core.core.has_work
    assert core.core.refresh(StepStats()).num_waiting == 1
    assert not core.answer("resume").error
    core.until(lambda: "bb" in core.ended)
    assert core.is_right("bb")


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_pause_is_confirmed_when_no_step_is_in_flight(mode: str) -> None:
    """Check that weights or memory are not changed while a step still reads them."""
    core = RpcCore(depth=2, lazy=True)
    core.add("a")
    core.until(lambda: len(core.core.step_queue) > 0)
    number = core.ask("pause", mode=mode)
    core.rpc.turn()
    assert number not in core.replies and len(core.core.step_queue) > 0
    while number not in core.replies:
        core.core.step()
        core.rpc.turn()
    assert not len(core.core.step_queue)


def test_resume_cancels_the_wait(core: RpcCore) -> None:
    core.add("a", 50)
    core.turn()
    number = core.ask("pause", mode="wait")
    core.turn()
    assert not core.answer("resume").error
    core.until(lambda: number in core.replies)
    assert core.replies[number].is_request and "resumed" in core.replies[number].error
    core.until(lambda: "a" in core.ended)
    assert core.is_right("a", 50)


def test_pause_with_abort_ends_running_and_waiting_requests(core: RpcCore) -> None:
    core.add("a")
    core.until(lambda: "a" in core.tokens)
    core.answer("pause", mode="keep")
    core.add("bb")
    assert not core.ended
    core.answer("pause", mode="abort", clear_cache=True)
    assert {id: finish.reason for id, finish in core.ended.items()} == {"a": "abort", "bb": "abort"}
    assert core.core.scheduler.kv.pool.usage == 0
    core.answer("resume")
    core.add("ccc")
    core.until(lambda: "ccc" in core.ended)
    assert core.is_right("ccc")


@pytest.mark.parametrize("clear_cache", [False, True])
def test_kept_requests_are_recomputed_if_the_cache_is_cleared(core: RpcCore, clear_cache: bool) -> None:
    """Check that no key or value is left that was computed by weights from before the pause."""
    core.add("a")
    core.until(lambda: len(core.tokens.get("a", [])) == 5)
    core.answer("pause", mode="keep", clear_cache=clear_cache)
    assert (core.core.scheduler.kv.pool.usage == 0) is clear_cache
    core.answer("resume")
    core.until(lambda: "a" in core.ended)
    assert core.is_right("a")


@pytest.mark.parametrize("level", [1, 2])
def test_kept_requests_restart_after_sleep(core: RpcCore, level: int) -> None:
    """Check that no prefix or block is taken for filled in the new cache."""
    for id in ("a", "bb", "ccc"):
        core.add(id)
    core.until(lambda: len(core.tokens.get("a", [])) == 5)
    core.answer("pause", mode="keep")
    assert not core.answer("sleep", level=level).error
    assert core.calls == [("sleep", level)] and core.answer("sleep_level").value == level
    assert core.answer("resume").is_request, "the engine sleeps"
    worker = core.engine.worker
    worker.cache = [None] * len(worker.cache)
    core.add("dddd")
    wake_up(core, tags=["kv_cache"])
    assert core.answer("sleep_level").value == level and core.core.pause_state.is_shut
    assert ("warm_up",) not in core.calls
    wake_up(core, tags=["weights"])
    assert core.calls[-2:] == [("wake_up", ["kv_cache", "weights"]), ("warm_up",)]
    core.until(lambda: len(core.ended) == 4)
    assert all(core.is_right(id) for id in ("a", "bb", "ccc", "dddd"))


def test_prefix_cache_reset_with_running_requests(core: RpcCore) -> None:
    """Check that no request ends or repeats tokens, and that a paused engine stays paused."""
    for id in ("a", "bb"):
        core.add(id)
    core.until(lambda: len(core.tokens.get("a", [])) == 5)
    assert core.answer("reset_prefix_cache").value is False
    assert core.answer("reset_running").value is True and core.core.pause_state.is_open
    core.until(lambda: len(core.tokens["a"]) == 9)
    core.answer("pause", mode="keep")
    assert core.answer("reset_running").value is True and core.core.pause_state.is_shut
    core.answer("resume")
    core.until(lambda: len(core.ended) == 2)
    assert core.is_right("a") and core.is_right("bb")


def test_prefix_cache_reset_while_another_engine_is_busy(core: RpcCore) -> None:
    """Check that it does not wait for a pipeline that idle steps keep full."""
    core.core.step_queue.lockstep = BusyPeer()  # type: ignore[assignment]
    core.engine.check = lambda plan: None  # type: ignore[method-assign]  # it wants work in all
    core.add("a")
    core.until(lambda: len(core.tokens.get("a", [])) == 5)
    number = core.ask("reset_running")
    for _ in range(5):
        core.turn()
    assert core.replies[number].value is True
    core.until(lambda: "a" in core.ended)
    assert core.is_right("a")


def test_sleep_can_be_retried_after_failure() -> None:
    """Check that a failed sleep is not taken for sleep, with its memory still in use."""
    cores = [RpcCore(), RpcCore()]
    cores[1].failing["sleep"] = MemoryError("no host memory")
    operation = operation_of(*cores)
    with pytest.raises(EngineError, match="try again, or call wake_up: no host memory"):
        asyncio.run(operation.sleep(2))
    assert asyncio.run(operation.is_sleeping()) and cores[1].answer("resume").is_request
    asyncio.run(operation.sleep(2))
    assert [core.calls for core in cores] == [[("sleep", 2)], [("sleep", 2), ("sleep", 2)]]
    asyncio.run(operation.sleep(2))
    assert len(cores[1].calls) == 2, "the engine sleeps already"
    wake_up(*cores)
    assert all(core.core.pause_state.is_open and not core.core.pause_state.is_unsure for core in cores)


def test_partially_woken_engine_can_sleep_again(core: RpcCore) -> None:
    operation = operation_of(core)
    asyncio.run(operation.sleep(1))
    wake_up(core, tags=["weights"])
    asyncio.run(operation.sleep(1))
    assert [call[0] for call in core.calls] == ["sleep", "wake_up", "sleep"]


@pytest.mark.parametrize("method", ["wake_up", "warm_up"])
def test_failed_wake_up_of_one_engine_leaves_all_asleep(method: str) -> None:
    """Check that no engine warms up or steps without the others, and that all are called again."""
    cores = [RpcCore(), RpcCore()]
    for core in cores:
        core.answer("pause", mode="abort")
        core.answer("sleep", level=1)
        core.calls.clear()
    cores[1].failing[method] = RuntimeError("no memory")
    with pytest.raises(EngineError, match="no memory"):
        wake_up(*cores)
    assert (("warm_up",) in cores[0].calls) == (method == "warm_up")
    assert cores[1].answer("resume").is_request, "the engine sleeps"
    assert all(core.core.pause_state.is_shut and core.answer("sleep_level").value == 1 for core in cores)
    for core in cores:
        core.calls.clear()
    wake_up(*cores)
    expected = [("wake_up", ["kv_cache", "weights"]), ("warm_up",)]
    assert all(core.calls == expected and core.core.pause_state.is_open for core in cores)
    assert all(core.answer("sleep_level").value == 0 for core in cores)


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
def test_unknown_calls_are_rejected(core: RpcCore, method: str, args: dict[str, Any]) -> None:
    assert core.answer(method, **args).is_request and not core.calls


def test_unserializable_worker_results_are_reported(core: RpcCore) -> None:
    core.results = [object()]
    assert core.answer("collective_rpc", method="f").is_request
    core.results = [1, {"a": None}]
    assert core.answer("collective_rpc", method="f").value == [1, {"a": None}]


def test_abort_by_external_request_ids(core: RpcCore) -> None:
    for id in ("cmpl-1-0-ab12", "cmpl-1-1-ab13", "2_cmpl-2-ab14", "cmpl-3-ab15"):
        core.add(id)
    assert core.answer("abort", request_ids=["cmpl-1", "cmpl-2", "nobody"]).value == 3
    assert "cmpl-3-ab15" not in core.ended
    assert core.answer("abort", request_ids=[]).value == 0
    assert core.answer("abort", request_ids=None).value == 1


# ---- LoRA adapters


def with_adapters(**limits: Any) -> tuple[RpcCore, FakeLoader]:
    library = FakeLoader(at_once=False)
    core = RpcCore(adapters=LoRAScheduler(library, max_slots=1, max_read=2), **limits)
    core.engine.worker.host = library.host
    return core, library


def test_load_adapter_returns_when_loaded_or_reports_its_error() -> None:
    core, library = with_adapters()
    number = core.ask("add_adapter", lora={"lora_name": "x", "lora_int_id": 1, "lora_path": "/x"})
    core.turn()
    assert number not in core.replies and core.core.scheduler.adapters.names == []
    library.complete_next(RequestError("No adapter found for /x"))
    core.until(lambda: number in core.replies)
    assert core.replies[number].is_request and core.replies[number].error == "No adapter found for /x"
    number = core.ask("add_adapter", lora={"lora_name": "x", "lora_int_id": 1, "lora_path": "/x"})
    library.complete_next()
    core.until(lambda: number in core.replies)
    assert core.replies[number].value.digest == digest("/x")
    assert core.core.scheduler.adapters.names == ["x"]


def test_unloaded_adapter_stays_until_its_requests_end() -> None:
    core, library = with_adapters()
    core.engine.add("a", [1, 5, 7, 11], 20, lora=lora("x"))
    library.complete_next()
    core.until(lambda: "a" in core.tokens)
    number = core.ask("remove_adapter", name="x")
    core.turn()
    assert number not in core.replies and library.host
    core.until(lambda: number in core.replies)
    assert core.ended["a"].reason == "length" and core.replies[number].value is True
    assert not library.host and core.core.scheduler.adapters.names == []
    assert core.answer("remove_adapter", name="x").value is False


@pytest.mark.parametrize("level", [1, 2])
def test_wake_up_restores_adapters_and_level_2_reloads_them(level: int) -> None:
    core, library = with_adapters()
    core.engine.add("a", [1, 5, 7, 11], 20, lora=lora("x"))
    library.complete_next()
    core.until(lambda: "a" in core.tokens)
    core.answer("pause", mode="keep")
    assert not core.answer("sleep", level=level).error
    core.engine.worker.slots.clear()
    if level == 2:
        library.host.clear()
    reply = core.answer("add_adapter", lora={"lora_name": "y", "lora_int_id": 1, "lora_path": "/y"})
    assert reply.is_request and "wake it up" in reply.error
    wake_up(core)
    if level == 2:
        core.core.scheduler.settle()
        library.complete_next()
    core.until(lambda: "a" in core.ended)
    assert core.tokens["a"] == continuation([1, 5, 7, 11], 20, digest("/adapters/x"))
    assert library.names == ["x"] * level


def test_sleep_waits_for_adapter_loads() -> None:
    core, library = with_adapters()
    core.engine.add("a", [1, 5, 7, 11], 20, lora=lora("x"))
    number = core.ask("pause", mode="keep")
    core.turn()
    assert number not in core.replies
    library.complete_next()
    core.until(lambda: number in core.replies)
    assert not core.replies[number].error
