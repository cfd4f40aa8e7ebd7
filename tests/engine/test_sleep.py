"""Tests of LLM.sleep, wake_up and collective_rpc: memory is freed and restored, and outputs do not change."""

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
from quire.kernels.host_memory import pin
from quire.worker.sleep import OffloadedWeights
from quire.worker.worker import Worker

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7 * i % 50 + 5, *range(20, 20 + i)] for i in range(4)]
ENGINES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two ranks": {"tensor_parallel_size": 2},
    "two cores": {"data_parallel_size": 2},
}
LEVELS = {"one worker": (1, 2), "two ranks": (2,), "two cores": (1,)}
"""Sleep levels per engine; ranks and cores receive the command in different ways."""


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


def generated_ids(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_outputs_are_equal_after_sleep(llm: LLM, request: pytest.FixtureRequest) -> None:
    """Check recorded steps, the KV cache, the weights, and that no prefix hits an empty cache."""
    before = generated_ids(llm)
    assert generated_ids(llm) == before  # recorded by now
    for level in LEVELS[request.node.callspec.params["llm"]]:
        llm.sleep(level)
        llm.sleep(level)
        with pytest.raises(RequestError, match="wake_up"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.wake_up(["weights"])
        with pytest.raises(RequestError, match="wake_up"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.wake_up(["kv_cache"])
        assert generated_ids(llm) == before
        llm.wake_up()  # awake already
        assert generated_ids(llm) == before


def test_collective_rpc_calls_all_workers(llm: LLM) -> None:
    actual = llm.collective_rpc("memory_stats")
    assert len(actual) == llm.get_world_size() and all(item["weights"] > 0 for item in actual)
    assert llm.collective_rpc("check_health") == [None] * llm.get_world_size()
    for method, arguments, problem in [
        ("no_such", (), "no method 'no_such'"),
        ("_bind", (1,), "no method"),
        ("__init__", (), "no method"),
        ("model", (), "no method"),
        ("memory_stats", (1, 2), "too many positional arguments"),
        ("close", (), "engine alone"),
        ("sleep", (1,), "engine alone"),
    ]:
        with pytest.raises(RequestError, match=problem):
            llm.collective_rpc(method, args=arguments)
    generated_ids(llm)


def test_internal_worker_methods_cannot_be_called() -> None:
    assert open_methods(Worker.__new__(Worker)) == ["check_health", "memory_stats"]


def test_level_2_frees_the_model(alone: LLM) -> None:
    """Check that no part of the engine keeps a reference to the weights."""
    models = [weakref.ref(worker) for worker in alone.collective_rpc(lambda worker: worker.model)]
    alone.sleep(level=2)
    gc.collect()
    assert [model() for model in models] == [None]
    assert alone.collective_rpc("memory_stats")[0]["weights"] == 0
    alone.wake_up()
    assert alone.collective_rpc("memory_stats")[0]["weights"] > 0


def test_level_2_frees_objects_frozen_by_the_collector(alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a core process, where all objects of its start, including dead cycles, are frozen."""

    def make_a_circle(worker: Any) -> Any:
        worker.model.itself = [worker.model]
        return weakref.ref(worker.model)

    monkeypatch.setattr("quire.system.process._is_tuned", True)
    (model,) = alone.collective_rpc(make_a_circle)
    gc.freeze()
    try:
        alone.sleep(level=2)
        assert model() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.freeze()  # what the tests have imported: a later collection would take a second
    alone.wake_up()
    generated_ids(alone)


def cache_bytes(worker: Any) -> int:
    caches = [module.k_cache for module in worker.model.modules() if hasattr(module, "k_cache")]
    return sum(cache.nbytes for cache in caches)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("method", ["quire.worker.loaded_model.bind", "quire.worker.cpu.CpuDevice.warm_up"])
def test_second_wake_up_completes_a_failed_one(
    alone: LLM, method: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no step runs with the one-block cache of a sleeping worker.

    Also check that a failed wake-up leaves no cache allocated.
    """

    def fail(*_: Any, **arguments: Any) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("no room")

    before, full = generated_ids(alone), alone.collective_rpc(cache_bytes)[0]
    alone.sleep(level)
    monkeypatch.setattr(method, fail)
    with pytest.raises(EngineError, match="no room"):
        alone.wake_up()
    with pytest.raises(RequestError, match="wake_up"):
        alone.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert alone.collective_rpc(cache_bytes)[0] < full / 4
    alone.wake_up()
    assert alone.collective_rpc(cache_bytes)[0] == full
    assert generated_ids(alone) == before


class FakeCudaDevice(str):
    """A device that is a CPU to torch and none to a worker."""

    type = "cuda"


def test_failed_sleep_wakes_up_again(alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a failure to allocate host memory for the weights after the cache was freed."""

    def fail(model: Any) -> None:
        raise MemoryError("no room")

    before, full = generated_ids(alone), alone.collective_rpc(cache_bytes)[0]
    monkeypatch.setattr("quire.worker.worker.OffloadedWeights", fail)
    alone.collective_rpc(lambda worker: monkeypatch.setattr(worker, "device", FakeCudaDevice("cpu")))
    with pytest.raises(EngineError, match="no room"):
        alone.sleep(1)
    monkeypatch.undo()
    assert alone.collective_rpc(cache_bytes)[0] < full / 4
    alone.wake_up()
    assert alone.collective_rpc(cache_bytes)[0] == full
    assert generated_ids(alone) == before


def test_level_1_frees_the_cache(alone: LLM) -> None:
    full = alone.collective_rpc(cache_bytes)[0]
    alone.sleep(level=1)
    assert alone.collective_rpc(cache_bytes)[0] < full / 4
    alone.wake_up()
    assert alone.collective_rpc(cache_bytes)[0] == full


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_queued_requests_and_sleep(alone: LLM, mode: str) -> None:
    expected = generated_ids(alone)
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
    actual = [list(output.outputs[0].token_ids) for output in outputs]
    reasons = {output.outputs[0].finish_reason for output in outputs}
    if mode == "abort":
        assert reasons == {"abort"} and [item[:2] for item in actual] == [item[:2] for item in expected]
    else:
        assert reasons == {"length"} and actual == expected
    assert generated_ids(alone) == expected


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"level": 3}, "unknown level 3"), ({"mode": "later"}, "unknown mode 'later'")],
)
def test_invalid_sleep_and_wake_up_arguments_change_nothing(alone: LLM, arguments: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        alone.sleep(**arguments)
    with pytest.raises(RequestError, match="unknown tags"):
        alone.wake_up(["weights", "dreams"])
    assert generated_ids(alone)


def test_sleep_needs_enable_sleep_mode(model: TextModel) -> None:
    with pytest.raises(RequestError, match="enable_sleep_mode"):
        open_text(model).sleep()


def test_sleep_level_can_be_raised_but_not_lowered(alone: LLM) -> None:
    before = generated_ids(alone)
    alone.sleep(1)
    alone.sleep(2)
    with pytest.raises(RequestError, match="level 2 already"):
        alone.sleep(1)
    alone.wake_up()
    assert generated_ids(alone) == before


def test_offloaded_weights_return_to_the_same_tensors() -> None:
    """Check that views and tied weights stay the same tensors, and that memory is freed meanwhile."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 30)).requires_grad_(False)
    model[1].bias = torch.nn.Parameter(model[0].bias[:30], requires_grad=False)
    part, x = model[0].weight[3:5].t(), torch.randn(2, 30)
    before, held = model(x), part.clone()
    stowed = OffloadedWeights(model)
    assert stowed.num_bytes == 4 * (2 * 30 * 50 + 50)
    assert {parameter.untyped_storage().nbytes() for parameter in model.parameters()} == {0}
    stowed.restore()
    assert torch.equal(model(x), before) and torch.equal(part, held)


def test_failed_pinning_does_not_fail_later_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that CUDA's sticky last error is cleared."""
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


def test_profile_of_a_run(model: TextModel, tmp_path: Path) -> None:
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")}
    llm = open_text(model, profiler_config=config, enforce_eager=True)
    with pytest.raises(RequestError, match="start one first"):
        llm.stop_profile()
    llm.start_profile("mine")
    with pytest.raises(RequestError, match="already"):
        llm.start_profile()
    generated_ids(llm)
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
def test_missing_profilers_are_rejected(model: TextModel, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_text(model, profiler_config=config)
