"""Tests of the pool of several models under one memory budget, with backends that only keep records."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_backend import Backend

from quire.errors import EngineDead, EngineError
from quire.frontend.model_pool import RETRY_S, ModelPool, PoolModel
from quire.memory import ModelMemory

TIMEOUT_S = 60
"""Limit after which a hanging test fails."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6  # so that the order of uses is known
        return self.now


class Models:
    """A pool of models that take 10 bytes each, 4 of them weights."""

    def __init__(self, names: str, budget: int, pinned: str = "", **settings: Any) -> None:
        self.clock = Clock()
        of_model = {name: settings.pop(name) for name in ("keeps_weights", "can_sleep") if name in settings}
        self.backends = {name: Backend() for name in names}
        self.pool = ModelPool(
            [
                PoolModel(name, backend, ModelMemory(4, 10), pinned=name in pinned, **of_model)
                for name, backend in self.backends.items()
            ],
            budget_bytes=budget,
            clock=self.clock,
            **settings,
        )

    def __getitem__(self, name: str) -> PoolModel:
        return self.pool.models[name]

    @property
    def states(self) -> dict[str, str]:
        return {name: model.state for name, model in self.pool.models.items()}

    async def use(self, name: str) -> None:
        async with self.pool.using(self[name]):
            await asyncio.sleep(0)

    def run(self, talk: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def go() -> None:
            self.pool.start()
            async with asyncio.timeout(TIMEOUT_S):
                await self.pool.started.wait()
                await talk()
                await self.pool.close()
            assert not any(backend.is_loaded for backend in self.backends.values())

        asyncio.run(go())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_mixed_requests_stay_within_the_budget(keeps_weights: bool) -> None:
    """Every request ends, each with its model awake, and the models never use more than the budget."""
    models, ended = Models("abc", 24, keeps_weights=keeps_weights), list[str]()
    chance = random.Random(7)

    async def request(name: str, num_turns: int) -> None:
        async with models.pool.using(models[name]):
            for _ in range(num_turns):
                await asyncio.sleep(0)
                assert models[name].is_awake and models.backends[name].is_loaded
                assert sum(model.num_bytes for model in models.pool.models.values()) <= 24
        ended.append(name)

    async def talk() -> None:
        tasks = []
        for _ in range(500):
            tasks.append(asyncio.create_task(request(chance.choice("abc"), chance.randrange(5))))
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    models.run(talk)
    assert len(ended) == 500
    assert all(backend.calls.count("load") == 1 for backend in models.backends.values())


def test_model_with_endless_requests_makes_way() -> None:
    """The requests of one model overlap, so that it is never idle; the other still has its turn."""
    models, done = Models("ab", 10), asyncio.Event()

    async def busy() -> None:
        async def overlapping() -> None:
            while not done.is_set():
                async with models.pool.using(models["a"]):
                    for _ in range(3):
                        await asyncio.sleep(0)

        await asyncio.gather(*(overlapping() for _ in range(3)))

    async def talk() -> None:
        traffic = asyncio.create_task(busy())
        await until(lambda: models["a"].num_users > 1)
        for _ in range(5):
            await models.use("b")
        done.set()
        await traffic

    models.run(talk)
    assert models.backends["a"].calls.count("sleep 1") >= 5


def test_first_models_that_fit_are_loaded_pinned_ones_first() -> None:
    models = Models("abc", 20, pinned="c")

    async def talk() -> None:
        assert models.states == {"a": "awake", "b": "unloaded", "c": "awake"}

    models.run(talk)


def test_least_recently_used_model_makes_way_and_pinned_ones_stay() -> None:
    models = Models("abcd", 30, pinned="a")

    async def talk() -> None:
        await models.use("b")
        await models.use("c")
        await models.use("b")
        await models.use("d")
        assert models.states == {"a": "awake", "b": "awake", "c": "asleep", "d": "awake"}
        await models.use("c")
        assert models.states == {"a": "awake", "b": "asleep", "c": "awake", "d": "awake"}
        assert models["b"].sleep_level == 1

    models.run(talk)
    assert models.backends["a"].calls == ["load", "unload"]


@pytest.mark.parametrize(
    ("settings", "call"),
    [
        ({}, "sleep 1"),
        ({"keeps_weights": True}, "sleep 2"),
        ({"host_free_bytes": lambda: 3}, "sleep 2"),
        ({"can_sleep": False}, "unload"),
    ],
)
def test_way_of_making_room(settings: dict[str, Any], call: str) -> None:
    """Level 1 only where it frees the memory of the budget and the host has room for the weights."""
    models = Models("ab", 10, **settings)

    async def talk() -> None:
        await models.use("b")
        assert models.backends["a"].calls == ["load", call]
        await models.use("a")

    models.run(talk)


def test_idle_models_sleep_at_level_1_and_then_2() -> None:
    models = Models("ab", 20, pinned="b", sleep_after_s=100.0, discard_after_s=200.0)

    async def talk() -> None:
        models.clock.now += 99
        await models.pool.sleep_idle()
        assert models.states == {"a": "awake", "b": "awake"}
        models.clock.now += 2
        await models.pool.sleep_idle()
        assert models.states == {"a": "asleep", "b": "awake"} and models["a"].sleep_level == 1
        models.clock.now += 100
        await models.pool.sleep_idle()
        assert models["a"].sleep_level == 2
        await models.pool.sleep_idle()
        await models.use("a")

    models.run(talk)
    assert models.backends["a"].calls == ["load", "sleep 1", "sleep 2", "wake_up", "unload"]


def test_model_in_use_does_not_fall_asleep() -> None:
    models = Models("a", 10, sleep_after_s=1.0)

    async def talk() -> None:
        async with models.pool.using(models["a"]):
            models.clock.now += 10
            await models.pool.sleep_idle()
            assert models.states == {"a": "awake"}

    models.run(talk)


def test_model_that_cannot_be_loaded_fails_alone() -> None:
    models = Models("ab", 20)
    models.backends["b"].error = EngineError("its weights are broken")

    async def talk() -> None:
        assert models.states == {"a": "awake", "b": "failed"}
        with pytest.raises(EngineDead, match="the model b could not be loaded: its weights are broken"):
            await models.use("b")
        await models.use("a")
        models.pool.check()
        with pytest.raises(EngineDead, match="its weights are broken"):
            models.pool.check_model(models["b"])
        models.backends["b"].error = None
        with pytest.raises(EngineDead):  # not at once: each attempt may take long
            await models.use("b")
        models.clock.now += RETRY_S
        await models.use("b")
        assert models.states == {"a": "awake", "b": "awake"}

    models.run(talk)


def test_operator_loads_again_after_a_failure() -> None:
    models = Models("a", 10)
    models.backends["a"].error = EngineError("no memory")

    async def talk() -> None:
        with pytest.raises(EngineDead, match="no model could be loaded; a: no memory"):
            models.pool.check()
        models.backends["a"].error = None
        await models.pool.load(models["a"])
        models.pool.check()

    models.run(talk)


def test_health_is_that_of_loaded_models() -> None:
    models = Models("ab", 10)

    async def talk() -> None:
        models.backends["b"].problem = EngineDead("not loaded")
        models.pool.check()
        models.backends["a"].problem = EngineDead("it hangs")
        with pytest.raises(EngineDead, match="it hangs"):
            models.pool.check()

    with pytest.raises(EngineDead, match="are being loaded"):
        models.pool.check()
    models.run(talk)


def test_unload_waits_for_running_requests_and_the_next_one_loads() -> None:
    models = Models("a", 10)

    async def talk() -> None:
        await models.pool.acquire(models["a"])
        unloading = asyncio.create_task(models.pool.unload(models["a"]))
        await until(lambda: models.states["a"] == "leaving")
        after = asyncio.create_task(models.use("a"))
        await until(lambda: len(models["a"].waiting) == 1)
        assert models.backends["a"].calls == ["load"]
        models.pool.release(models["a"])
        await unloading
        await after

    models.run(talk)
    assert models.backends["a"].calls == ["load", "unload", "load", "unload"]


def test_cancelled_unload_leaves_the_model_awake() -> None:
    models = Models("a", 10)

    async def talk() -> None:
        await models.pool.acquire(models["a"])
        unloading = asyncio.create_task(models.pool.unload(models["a"]))
        await until(lambda: models.states["a"] == "leaving")
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        await models.use("a")
        models.pool.release(models["a"])
        assert models.states == {"a": "awake"}

    models.run(talk)


def test_cancelled_request_holds_no_model() -> None:
    """A client that leaves while it waits must not keep the model awake, whenever it leaves."""
    models = Models("ab", 10)

    async def talk() -> None:
        for num_turns in range(20):
            name = "ba"[num_turns % 2]
            waiting = asyncio.create_task(models.pool.acquire(models[name]))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            waiting.cancel()
            (result,) = await asyncio.gather(waiting, return_exceptions=True)
            if result is None:
                models.pool.release(models[name])
            await models.use("a")
            await models.use("b")
            assert all(not model.num_users and not model.waiting for model in models.pool.models.values())

    models.run(talk)


@pytest.mark.parametrize("error", [EngineError("no host memory"), OSError("no host memory")])
def test_model_that_cannot_fall_asleep_is_unloaded(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models("a", 10, sleep_after_s=1.0)

    async def fail(level: int) -> None:
        raise error

    async def talk() -> None:
        models.clock.now += 10
        await models.pool.sleep_idle()
        assert models.states == {"a": "unloaded"} and models["a"].level == 0
        await models.use("a")

    monkeypatch.setattr(models.backends["a"], "sleep", fail)
    models.run(talk)
    assert models.backends["a"].calls == ["load", "unload", "load", "unload"]


def test_sleeping_model_whose_cores_ended_is_loaded_again() -> None:
    models = Models("ab", 10)

    async def talk() -> None:
        await models.use("b")
        models.backends["a"].is_loaded = False
        assert models.states["a"] == "unloaded"
        await models.use("a")

    models.run(talk)
    assert models.backends["a"].calls == ["load", "sleep 1", "load", "unload"]


def test_requests_in_line_get_an_error_when_the_server_stops() -> None:
    models = Models("ab", 10)

    async def talk() -> None:
        await models.pool.acquire(models["a"])
        waiting = asyncio.create_task(models.use("b"))
        await until(lambda: models.states["a"] == "leaving")
        await models.pool.close()
        with pytest.raises(EngineDead, match="shutting down"):
            await waiting

    models.run(talk)
