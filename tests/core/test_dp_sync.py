"""Tests of data-parallel engines with shared experts: each gives the same outputs as alone."""

import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracle import make_tiny
from staged import Engine
from threads import Table, ThreadGroup

from quire.config.expert_parallel import _free_ports
from quire.config.expert_placement import initial_placement
from quire.config.parallel import Rank
from quire.configure import configure
from quire.core import build
from quire.core.build import build_scheduler
from quire.core.dp_sync import Lockstep
from quire.core.engine_core import EngineCore
from quire.data.step_plan import StepPlan
from quire.errors import ConfigError
from quire.executor.inprocess import InProcessExecutor
from quire.parallel.world import World
from quire.worker.worker import Worker

PATIENCE_S = 120.0
"""Timeout of a test that hangs."""
TOKEN = "shared"


def address() -> str:
    return f"tcp://127.0.0.1:{_free_ports(1)}"


def plan_of(count: int) -> StepPlan:
    plan = StepPlan.idle(0)
    plan.rows, plan.total_tokens = np.zeros(1, np.int32), count
    return plan


def test_lockstep_rounds() -> None:
    """Check an engine that misses a round, one that continues when all are idle, and a late call."""
    where, rounds = address(), [[3, 0, 1], [0, 2, 0], [5, 5, 5], [0, 0, 0], [0, 0, 9]]
    seen: list[list[tuple[int, ...] | None]] = [[] for _ in range(3)]
    begin = [threading.Barrier(3, timeout=PATIENCE_S) for _ in rounds]

    def engine(rank: int) -> None:
        lockstep = Lockstep(rank, 3, where, token=TOKEN, timeout_s=PATIENCE_S)
        for number, counts in enumerate(rounds):
            begin[number].wait()
            if not counts[rank] and any(counts):
                while not lockstep.is_called:
                    time.sleep(0.001)
            agreed = lockstep.join_round(plan_of(counts[rank]) if counts[rank] else None)
            assert agreed is None or (agreed.total_tokens == counts[rank])
            seen[rank].append(None if agreed is None else agreed.counts)
        assert not lockstep.is_called
        begin[0].wait()
        lockstep.close()

    threads = [threading.Thread(target=engine, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    expected = [tuple(counts) if any(counts) else None for counts in rounds]
    assert seen == [expected] * 3


def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="choose another data_parallel_rpc_port"):
            Lockstep(0, 2, where, token=TOKEN)


ENGINE = """
import sys, time
from quire.core.dp_sync import Lockstep
lockstep = Lockstep(int(sys.argv[1]), 2, sys.argv[2], token="t", timeout_s=120)
print("here", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_dead_engine_ends_the_others(victim: int) -> None:
    where = address()
    engines = [
        subprocess.Popen([sys.executable, "-c", ENGINE, str(rank), where], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for engine in engines:
        assert engine.stdout is not None and engine.stdout.readline() == "here\n"
    engines[victim].kill()
    assert engines[1 - victim].wait(PATIENCE_S) == 1
    engines[victim].wait()


@pytest.mark.parametrize("error", [ConfigError("no weights"), KeyboardInterrupt()])
def test_engine_that_fails_to_start_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Check that engines meet before they load, so that one waiting in warm-up is ended at once."""
    where, ended, others = address(), threading.Event(), []
    monkeypatch.setattr(Lockstep, "_end", lambda lockstep: ended.set())

    def other() -> None:
        others.append(Lockstep(0, 2, where, token=TOKEN, timeout_s=PATIENCE_S))

    def fail(config: Any) -> None:
        raise error

    hub = threading.Thread(target=other)
    hub.start()
    monkeypatch.setattr(build, "open_lockstep", lambda *_: Lockstep(1, 2, where, token=TOKEN))
    monkeypatch.setattr(build, "with_largest", lambda config: config)
    monkeypatch.setattr(build, "open_publisher", lambda config: None)
    monkeypatch.setattr(build, "num_compilers", lambda config: 0)
    monkeypatch.setattr(build, "EXECUTORS", {"uni": fail})
    config: Any = SimpleNamespace(
        parallel=SimpleNamespace(distributed_executor_backend="uni"),
        model=SimpleNamespace(structured_outputs_config={}),
    )
    with pytest.raises(type(error)):
        build.build_core(config)
    hub.join(PATIENCE_S)
    assert ended.wait(PATIENCE_S)
    others[0].close()


class LockstepEngine(Engine):
    """An engine in lockstep with others in threads, or alone."""

    def __init__(self, model: Path, world: World, where: str, **settings: Any) -> None:
        defaults = {"model": str(model), "dtype": "float32", "block_size": 4, "enforce_eager": True}
        defaults |= {"use_tqdm_on_load": False, "max_num_seqs": 8, "num_gpu_blocks_override": 200}
        self.config = configure(defaults | settings)
        executor = InProcessExecutor.__new__(InProcessExecutor)
        executor._worker = Worker(self.config, world)
        self.world, self.where = world, where
        self.core = EngineCore(executor, build_scheduler(self.config, executor.start()))
        self.balancer: Any = executor._worker.balancer
        self.steps, self.most_in_flight = [], 0
        self.tokens, self.logprobs, self.prompt_logprobs = {}, {}, {}

    def live(self, stop: threading.Event, late: dict[int, list[Any]]) -> None:
        """Run until stopped; the requests of `late` arrive before the step with this number, or when it is
        idle.
        """
        size = self.world.ep.size // self.world.tp.size
        self.core.step_queue.lockstep = Lockstep(
            self.world.rank.dp, size, self.where, token=TOKEN, timeout_s=PATIENCE_S
        )
        number = 0
        while not stop.is_set() or late or self.core.scheduler.has_work:
            if late and (number >= min(late) or not self.core.has_work):
                for request in late.pop(min(late)):
                    self.add(*request)
            if self.core.has_work:
                self.step()
                number += 1
            else:
                time.sleep(0.001)


def traffic(seed: int) -> dict[int, list[Any]]:
    draw = random.Random(seed)

    def request(name: str) -> tuple[str, list[int], int]:
        return name, [draw.randrange(3, 90) for _ in range(draw.randint(1, 30))], draw.randint(2, 12)

    return {
        0: [request("a"), request("b")] if seed else [],
        5: [request(f"c{number}") for number in range(5)],
        20: [request("d")],
    }


def alone(model: Path, late: dict[int, list[Any]], **settings: Any) -> dict[str, list[int]]:
    engine = LockstepEngine(model, World(), "", **settings)
    for requests in late.values():
        for request in requests:
            engine.add(*request)
    return engine.run()


def together(model: Path, num_engines: int, **settings: Any) -> list[LockstepEngine]:
    table, where = Table(num_engines), address()
    worlds = [World(Rank(dp=rank), ep=ThreadGroup(table, rank)) for rank in range(num_engines)]
    settings |= {"enable_expert_parallel": True, "data_parallel_size": num_engines}
    engines = [LockstepEngine(model, world, where, **settings) for world in worlds]
    left, stop, errors = threading.Barrier(num_engines + 1, timeout=PATIENCE_S), threading.Event(), []

    def live(engine: LockstepEngine) -> None:
        try:
            engine.live(stop, traffic(engine.world.rank.dp))
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()
        left.wait()

    threads = [threading.Thread(target=live, args=(engine,), daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    wanted = [
        {request[0]: request[2] for some in traffic(rank).values() for request in some}
        for rank in range(num_engines)
    ]
    while not errors and time.monotonic() < deadline:
        got = [{id: len(actual) for id, actual in engine.tokens.items()} for engine in engines]
        if got == wanted and not any(engine.core.scheduler.has_work for engine in engines):
            break
        time.sleep(0.01)
    stop.set()
    left.wait()
    if errors:
        raise errors[0]
    for engine in engines:
        engine.core.close()
    return engines


CASES: dict[str, dict[str, Any]] = {
    "gathered": {},
    "sent": {"all2all_backend": "all2all", "expert_placement_strategy": "round_robin"},
    "moved": {
        "enable_eplb": True,
        "eplb_config": {"window_size": 6, "step_interval": 4, "num_redundant_experts": 2},
    },
    "moved at once": {
        "enable_eplb": True,
        "eplb_config": {"window_size": 1, "step_interval": 3, "use_async": False, "log_balancedness": True},
        "all2all_backend": "all2all",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_expert_parallel_engines_match_each_engine_alone(case: str, tmp_path: Path) -> None:
    """Check a late start, idle engines, steps of different lengths, and expert rebalancing."""
    model, _ = make_tiny("qwen3_moe", tmp_path)
    engines = together(model, 2, max_num_batched_tokens=16, **CASES[case])
    for rank, engine in enumerate(engines):
        expected = alone(model, traffic(rank), max_num_batched_tokens=16)
        assert engine.tokens == expected
        if "eplb_config" in CASES[case]:
            layers = engine.balancer.layers
            first = initial_placement(
                4, 2, "linear", CASES[case]["eplb_config"].get("num_redundant_experts", 0)
            )
            assert any(layer.places.placement != first for layer in layers), "no expert moved"
    assert any(not step.request_ids for engine in engines for step in engine.steps), "no engine was idle"
