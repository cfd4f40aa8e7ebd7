"""LLM.sleep and wake_up: memory goes and comes back, and nothing else changes; collective_rpc."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_text import TextModel, open_text, text_model

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineError, RequestError
from quire.executor.rpc import open_methods
from quire.system.process import collect_all
from quire.worker.sleep import OffloadedWeights, pin
from quire.worker.worker import Worker

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7 * i % 50 + 5, *range(20, 20 + i)] for i in range(4)]
ENGINES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two ranks": {"tensor_parallel_size": 2},
    "two cores": {"data_parallel_size": 2},
}
LEVELS = {"one worker": (1, 2), "two ranks": (2,), "two cores": (1,)}
"""Levels of sleep that are tried with each engine: ranks and cores differ in how the order reaches them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module", params=ENGINES)
def llm(model: TextModel, request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = open_text(model, enable_sleep_mode=True, **ENGINES[request.param])
    yield llm
    llm.llm_engine.close()


@pytest.fixture(scope="module")
def alone(model: TextModel) -> Iterator[LLM]:
    made = open_text(model, enable_sleep_mode=True)
    yield made
    made.llm_engine.close()


@pytest.fixture(autouse=True)
def quick_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep does not look through the objects of all imported modules, which takes a second in tests."""
    monkeypatch.setattr("quire.worker.sleep.collect_all", gc.collect)


def said(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_the_same_tokens_after_sleep(llm: LLM, request: pytest.FixtureRequest) -> None:
    """Catches tapes that play over memory that is gone, a cache or weights that did not come back, and a
    prefix that is found in an empty cache."""
    before = said(llm)
    assert said(llm) == before  # taped by now
    for level in LEVELS[request.node.callspec.params["llm"]]:
        llm.sleep(level)
        llm.sleep(level)
        with pytest.raises(RequestError, match="wake_up"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.wake_up(["weights"])
        with pytest.raises(RequestError, match="wake_up"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.wake_up(["kv_cache"])
        assert said(llm) == before
        llm.wake_up()  # awake already
        assert said(llm) == before


def test_methods_of_all_workers(llm: LLM) -> None:
    found = llm.collective_rpc("memory_stats")
    assert len(found) == llm.get_world_size() and all(each["weights"] > 0 for each in found)
    assert llm.collective_rpc("check_health") == [None] * llm.get_world_size()
    for method, given, problem in [
        ("no_such", (), "no method 'no_such'"),
        ("_bind", (1,), "no method"),
        ("__init__", (), "no method"),
        ("model", (), "no method"),
        ("memory_stats", (1, 2), "too many positional arguments"),
        ("close", (), "engine alone"),
        ("sleep", (1,), "engine alone"),
    ]:
        with pytest.raises(RequestError, match=problem):
            llm.collective_rpc(method, args=given)
    said(llm)


def test_only_what_is_meant_to_be_called_is_open() -> None:
    """A method that was made for the engine alone, and anybody can call it."""
    assert open_methods(Worker.__new__(Worker)) == ["check_health", "memory_stats"]


def test_level_2_drops_the_model(alone: LLM) -> None:
    """A part of the engine that holds the weights would keep their memory."""
    models = [weakref.ref(worker) for worker in alone.collective_rpc(lambda worker: worker.model)]
    alone.sleep(level=2)
    gc.collect()
    assert [each() for each in models] == [None]
    assert alone.collective_rpc("memory_stats")[0]["weights"] == 0
    alone.wake_up()
    assert alone.collective_rpc("memory_stats")[0]["weights"] > 0


def test_level_2_drops_what_the_collector_was_told_to_pass_over(
    alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the process of a core, where all that was there at its start is frozen, dead circles too."""

    def make_a_circle(worker: Any) -> Any:
        worker.model.itself = [worker.model]
        return weakref.ref(worker.model)

    monkeypatch.setattr("quire.worker.sleep.collect_all", collect_all)
    (model,) = alone.collective_rpc(make_a_circle)
    gc.freeze()
    try:
        alone.sleep(level=2)
        assert model() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    alone.wake_up()
    said(alone)


def cache_bytes(worker: Any) -> int:
    caches = [module.k_cache for module in worker.model.modules() if hasattr(module, "k_cache")]
    return sum(cache.nbytes for cache in caches)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("method", ["quire.worker.loaded_model.bind", "quire.worker.cpu.CpuDevice.warm_up"])
def test_a_second_attempt_to_wake_up_makes_up_for_the_first(
    alone: LLM, method: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches steps in the one block of a cache that sleeps; and a cache that stays where one failed, so that
    there is no room for the next."""

    def fail(*_: Any, **given: Any) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("no room")

    before, whole = said(alone), alone.collective_rpc(cache_bytes)[0]
    alone.sleep(level)
    monkeypatch.setattr(method, fail)
    with pytest.raises(EngineError, match="no room"):
        alone.wake_up()
    with pytest.raises(RequestError, match="wake_up"):
        alone.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert alone.collective_rpc(cache_bytes)[0] < whole / 4
    alone.wake_up()
    assert alone.collective_rpc(cache_bytes)[0] == whole
    assert said(alone) == before


class LikeCuda(str):
    """A CPU to torch, and none to a worker."""

    type = "cuda"


def test_who_cannot_fall_asleep_wakes_up_whole(alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is gone when weights find no host memory."""

    def fail(model: Any) -> None:
        raise MemoryError("no room")

    before, whole = said(alone), alone.collective_rpc(cache_bytes)[0]
    monkeypatch.setattr("quire.worker.worker.OffloadedWeights", fail)
    alone.collective_rpc(lambda worker: monkeypatch.setattr(worker, "device", LikeCuda("cpu")))
    with pytest.raises(EngineError, match="no room"):
        alone.sleep(1)
    monkeypatch.undo()
    assert alone.collective_rpc(cache_bytes)[0] < whole / 4
    alone.wake_up()
    assert alone.collective_rpc(cache_bytes)[0] == whole
    assert said(alone) == before


def test_level_1_drops_the_cache(alone: LLM) -> None:
    whole = alone.collective_rpc(cache_bytes)[0]
    alone.sleep(level=1)
    assert alone.collective_rpc(cache_bytes)[0] < whole / 4
    alone.wake_up()
    assert alone.collective_rpc(cache_bytes)[0] == whole


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_what_is_queued(alone: LLM, mode: str) -> None:
    expected = said(alone)
    ids = alone.enqueue(PROMPTS, GREEDY, use_tqdm=False)
    for _ in range(3):
        assert not [output for output in alone.llm_engine.step() if output.finished]
    alone.sleep(1, mode)
    if mode == "keep":
        with pytest.raises(RequestError, match="wake_up"):
            alone.wait_for_completion(use_tqdm=False)
        alone.wake_up()
    outputs = alone.wait_for_completion(use_tqdm=False)
    alone.wake_up()
    assert [output.request_id for output in outputs] == ids
    found = [list(output.outputs[0].token_ids) for output in outputs]
    reasons = {output.outputs[0].finish_reason for output in outputs}
    if mode == "abort":
        assert reasons == {"abort"} and [each[:2] for each in found] == [each[:2] for each in expected]
    else:
        assert reasons == {"length"} and found == expected
    assert said(alone) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [({"level": 3}, "unknown level 3"), ({"mode": "later"}, "unknown mode 'later'")],
)
def test_what_cannot_be_had_changes_nothing(alone: LLM, given: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        alone.sleep(**given)
    with pytest.raises(RequestError, match="unknown tags"):
        alone.wake_up(["weights", "dreams"])
    assert said(alone)


def test_sleep_that_was_not_allowed(model: TextModel) -> None:
    with pytest.raises(RequestError, match="enable_sleep_mode"):
        open_text(model).sleep()


def test_deeper_sleep_and_no_lighter_one(alone: LLM) -> None:
    before = said(alone)
    alone.sleep(1)
    alone.sleep(2)
    with pytest.raises(RequestError, match="level 2 already"):
        alone.sleep(1)
    alone.wake_up()
    assert said(alone) == before


def test_stowed_weights_come_back_where_they_are_held() -> None:
    """Views of a weight, and two names of one, are the same afterwards; the memory is gone meanwhile."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 30)).requires_grad_(False)
    model[1].bias = torch.nn.Parameter(model[0].bias[:30], requires_grad=False)
    part, x = model[0].weight[3:5].t(), torch.randn(2, 30)
    before, held = model(x), part.clone()
    stowed = OffloadedWeights(model)
    assert stowed.num_bytes == 4 * (2 * 30 * 50 + 50)
    assert {each.untyped_storage().nbytes() for each in model.parameters()} == {0}
    stowed.restore()
    assert torch.equal(model(x), before) and torch.equal(part, held)


def test_memory_that_cannot_be_pinned_is_nobody_elses_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps its last error until somebody looks at it, as each launch does."""
    errors: list[int] = []

    def register(*_: int) -> int:
        errors.append(2)
        return 2

    def launch(*_: Any, **__: Any) -> None:
        if errors:
            raise torch.AcceleratorError(f"CUDA error {errors.pop()}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "ones", launch)
    assert not pin(torch.empty(8, dtype=torch.uint8))
    assert not errors


def test_a_profile_of_what_was_run(model: TextModel, tmp_path: Path) -> None:
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")}
    llm = open_text(model, profiler_config=config, enforce_eager=True)
    with pytest.raises(RequestError, match="start one first"):
        llm.stop_profile()
    llm.start_profile("mine")
    with pytest.raises(RequestError, match="already"):
        llm.start_profile()
    said(llm)
    llm.stop_profile()
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name.startswith("mine_") and '"aten::' in trace.read_text()
    with pytest.raises(RequestError, match="profiler_config"):
        open_text(model).start_profile()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"profiler": "proton"}, "the profiler 'proton' is not supported"),
        ({"profiler": "torch"}, "torch_profiler_dir"),
        ({"profiler": "torch", "torch_profiler_dir": 3}, "cannot be 3"),
        ({"profiller": "torch"}, "unknown profiler_config key"),
    ],
)
def test_profilers_that_are_not_there(model: TextModel, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_text(model, profiler_config=config)
