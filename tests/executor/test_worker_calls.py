"""Tests of worker extensions, and of functions that are called with the workers, in every kind of engine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_text import TextModel, open_text, text_model

from quire import LLM
from quire.errors import ConfigError, EngineError, RequestError
from quire.executor.rpc import invoke
from quire.system.pickled_calls import pack_function

EXTENSION = """
import torch


class Extension:
    def describe(self, greeting, loud=False):
        config = self.vllm_config
        assert self.model_config.max_model_len == config.model_config.max_model_len
        assert self.model_runner.model is self.get_model() and isinstance(self.device, torch.device)
        return [greeting.upper() if loud else greeting, self.rank, self.parallel_config.world_size]

    def fail(self):
        raise RuntimeError("out of luck")


class Clash:
    def load(self): ...
    def device(self): ...


def world_of(worker, power):
    return worker.parallel_config.world_size ** power
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a module that other processes can import, too."""
    (tmp_path / "my_worker.py").write_text(EXTENSION)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.syspath_prepend(tmp_path)
    import my_worker  # type: ignore[import-not-found]

    yield my_worker
    del sys.modules["my_worker"]


def check_calls(llm: LLM, module: Any, ranks: list[int], size: int) -> None:
    actual = llm.collective_rpc("describe", args=("hi",), kwargs={"loud": True})
    assert actual == [["HI", rank, size] for rank in ranks]
    with pytest.raises((RuntimeError, EngineError), match="out of luck"):
        llm.collective_rpc("fail")
    with pytest.raises(RequestError, match="missing a required argument: 'greeting'"):
        llm.collective_rpc("describe")
    assert llm.collective_rpc(module.world_of, args=(2,)) == [size**2] * len(ranks)
    assert llm.collective_rpc("check_health") == [None] * len(ranks)


def test_calls_of_a_worker_in_this_process(model: TextModel, module: Any) -> None:
    llm = open_text(model, worker_extension_cls="my_worker.Extension")
    check_calls(llm, module, ranks=[0], size=1)
    assert llm.collective_rpc(lambda worker: worker.rank) == [0]
    with pytest.raises(NotImplementedError, match="wake_up has restored them"):
        llm.collective_rpc("reload_weights")


def test_calls_of_ranks(model: TextModel, module: Any) -> None:
    """Catches results in another order, and a call that leaves the ranks out of step."""
    llm = open_text(model, worker_extension_cls=module.Extension, tensor_parallel_size=2)
    check_calls(llm, module, ranks=[0, 1], size=2)
    prompt = [5, 6, 7]
    assert len(llm.generate([prompt], use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_calls_of_engines_in_other_processes(model: TextModel, module: Any) -> None:
    llm = open_text(model, worker_extension_cls="my_worker:Extension", data_parallel_size=2)
    check_calls(llm, module, ranks=[0, 0], size=1)


def test_functions_are_refused_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rank that unpickles what it receives although the operator did not allow it."""
    with pytest.raises(RequestError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        pack_function(os.getpid)
    monkeypatch.setenv("QUIRE_ALLOW_INSECURE_SERIALIZATION", "1")
    packed = pack_function(repr)
    with pytest.raises(RequestError, match="cannot be pickled"):
        pack_function(print, args=(sys.stdout,))
    monkeypatch.delenv("QUIRE_ALLOW_INSECURE_SERIALIZATION")
    with pytest.raises(RequestError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        invoke(object(), packed, (), {})


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("my_worker.Clash", r"has names that the worker has already: device, load; rename them"),
        ("my_worker.Missing", "'my_worker.Missing' cannot be imported: AttributeError"),
        ("my worker", "'my worker' is not a class path"),
    ],
)
def test_wrong_extension_stops_the_start(model: TextModel, module: Any, path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_text(model, worker_extension_cls=path)
