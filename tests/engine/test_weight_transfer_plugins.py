"""Tests of weight updates by backends of plugins: Quire's interface, and vLLM's of new and older releases."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_package import install
from safetensors.torch import load_file, save_file
from tiny_text import TextModel, open_text, text_model

from quire import LLM, SamplingParams
from quire.config.extensions import TRANSFER_BACKENDS
from quire.config.plugins import load_plugins
from quire.entrypoints import vllm_shim
from quire.entrypoints.vllm_functions import WeightTransferEngineFactory
from quire.errors import RequestError

OWN = """
from safetensors.torch import load_file

from quire.loader.update import TensorInfo
from quire.worker.weight_transfer import WeightTransport


class Folder(WeightTransport):
    def connect(self, info):
        self.folder = info["folder"]

    def describe(self, info):
        self.weights = load_file(f"{self.folder}/{info['file']}")
        return [TensorInfo(name, x.dtype, tuple(x.shape)) for name, x in self.weights.items()]

    def receive(self, info, tensors):
        yield from self.weights.values()
"""
ENGINE = """
from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class InitInfo(WeightTransferInitInfo):
    folder: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    file: str


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        assert config.backend == "new" and self.parallel_config.world_size >= 1
        assert self.model_config.get_vocab_size() > 1

    def init_transfer_engine(self, init_info):
        self.folder = init_info.folder

    def start_weight_update(self):
        self.calls = ["start"]

    def receive_weights(self, update_info):
        for name, tensor in load_file(f"{self.folder}/{update_info.file}").items():
            self.model.load_weights([(name, tensor)])
            tensor.zero_()  # a buffer that is used again

    def finish_weight_update(self):
        assert self.calls == ["start"]
        self.calls.clear()

    def shutdown(self):
        pass


class OlderEngine(WeightTransferEngine):
    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def __init__(self, config, parallel_config):
        super().__init__(config, parallel_config)
        assert self.parallel_config.tensor_parallel_size >= 1

    def init_transfer_engine(self, init_info):
        self.folder = init_info.folder

    def receive_weights(self, update_info, load_weights):
        load_weights(list(load_file(f"{self.folder}/{update_info.file}").items()))
"""
REGISTER = """
def own():
    from quire.plugins import register_weight_transfer

    register_weight_transfer("own", "folder_transport:Folder")


def engines():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if "new" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("new", "folder_engine", "Engine")
        WeightTransferEngineFactory.register_engine("older", "folder_engine", "OlderEngine")
"""
PROMPT: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8, 9]}]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the backends as plugins, for this process and its children."""
    groups = {
        "quire.plugins": {"own": "backends:own"},
        "vllm.general_plugins": {"engines": "backends:engines"},
    }
    files = {"folder_transport.py": OWN, "folder_engine.py": ENGINE, "backends.py": REGISTER}
    install(tmp_path, "backends", groups, files)
    monkeypatch.setattr(TRANSFER_BACKENDS, "entries", dict(TRANSFER_BACKENDS.entries))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins.cache_clear()
    yield
    load_plugins.cache_clear()


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize(("backend", "tp"), [("own", 1), ("new", 1), ("older", 1), ("new", 2)])
def test_backend_of_a_plugin_updates_the_weights(
    backend: str, tp: int, model: TextModel, tmp_path: Path
) -> None:
    """Catches a backend that some processes lack, tensors that are kept without a copy, and a half update."""
    old = load_file(model.path / "model.safetensors")
    changed = {name: x + 0.5 * x.std() * torch.randn_like(x) for name, x in old.items()}
    save_file(changed, tmp_path / "changed")
    save_file(changed | {"model.norm.weight": torch.zeros(3)}, tmp_path / "wrong")
    llm = open_text(model, weight_transfer_config={"backend": backend}, tensor_parallel_size=tp)
    before = tokens(llm)
    llm.init_weight_transfer_engine({"init_info": {"folder": str(tmp_path)}})
    llm.start_weight_update()
    with pytest.raises(RequestError, match=r"model.norm.weight has the shape \(3,\)"):
        llm.update_weights({"update_info": {"file": "wrong"}})
    if backend != "own":
        with pytest.raises(RequestError, match=r"Engine failed: .*Invalid update_info for \w+: .*'other'"):
            llm.update_weights({"update_info": {"other": "wrong"}})
    assert tokens(llm) == before
    llm.start_weight_update()
    llm.update_weights({"update_info": {"file": "changed"}})
    llm.finish_weight_update("v1")
    assert tokens(llm) != before
    actual = llm.collective_rpc(_norm_of)[0]
    assert torch.equal(torch.tensor(actual), changed["model.norm.weight"])
    llm.llm_engine.close()


def _norm_of(worker: Any) -> list[float]:
    values = next(x for name, x in worker.get_model().named_parameters() if name.split(".")[0] == "norm")
    return list(values.tolist())


def test_names_are_registered_once() -> None:
    vllm_shim.install()
    with pytest.raises(ValueError, match="'nccl' is already registered"):
        WeightTransferEngineFactory.register_engine("nccl", "folder_engine", "Engine")
