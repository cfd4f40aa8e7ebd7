"""Tests of the calls that training frameworks make on vLLM's engines, beside those of weight updates."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_adapter import write_adapter
from tiny_text import TextModel, open_text, text_model
from torch import nn

from quire import LLM, LoRARequest, SamplingParams
from quire.entrypoints import vllm_shim

EXTENSION = """
import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

logger = init_logger(__name__)


class Extension:
    def __new__(cls, **kwargs):
        worker = super().__new__(cls)
        worker.made_with = {"rank": kwargs["rank"], "local_rank": kwargs["local_rank"]}
        worker.made_with["dtype"] = str(kwargs["vllm_config"].model_config.dtype)
        return worker

    def describe(self):
        model = self.model_runner.get_model()
        logger.info_once("described")
        return {
            "made_with": self.made_with,
            "is_module": isinstance(model, torch.nn.Module),
            "is_named": "" not in dict(model.named_parameters()),
            "ranks": [get_tensor_model_parallel_rank(), get_tp_group().world_size],
            "dtype": str(self.model_runner.model_config.dtype),
            "load_format": self.model_runner.load_config.load_format,
            "index": self.parallel_config.data_parallel_index,
        }

    def reload(self, path):
        from safetensors.torch import load_file

        model = self.model_runner.model
        initialize_layerwise_reload(model)
        model.load_weights(iter(load_file(path).items()))
        finalize_layerwise_reload(model, self.model_runner.model_config)
"""
PROMPT: dict[str, Any] = {"prompt_token_ids": [5, 6, 7, 8, 9]}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def tokens(llm: LLM, lora: LoRARequest | None = None) -> list[int]:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=lora)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("tp", [1, 2])
def test_extension_has_the_names_of_vllm(
    tp: int, model: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an extension that makes the worker by vLLM's keyword arguments, as verl's does."""
    (tmp_path / f"surface_{tp}.py").write_text(EXTENSION)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)
    llm = open_text(model, worker_extension_cls=f"surface_{tp}.Extension", tensor_parallel_size=tp)
    for rank, facts in enumerate(llm.collective_rpc("describe")):
        assert facts == {
            "made_with": {"rank": rank, "local_rank": rank, "dtype": "torch.float32"},
            "is_module": True,
            "is_named": True,
            "ranks": [rank, tp],
            "dtype": "torch.float32",
            "load_format": "auto",
            "index": 0,
        }
    expected = tokens(llm)
    llm.collective_rpc("reload", args=(str(model.path / "model.safetensors"),))
    llm.reset_prefix_cache()
    assert tokens(llm) == expected
    llm.llm_engine.close()


def test_engine_has_the_configuration_of_vllm(model: TextModel) -> None:
    llm = open_text(model, max_model_len=64)
    config = json.loads((model.path / "config.json").read_text())
    for found in (llm.model_config, llm.llm_engine.model_config, llm.llm_engine.vllm_config.model_config):
        assert (found.max_model_len, found.dtype) == (64, torch.float32)
        assert found.hf_config.vocab_size == found.get_vocab_size() == config["vocab_size"]
        assert found.hf_text_config.num_hidden_layers == found.get_num_layers() == len(model.hf.model.layers)
        assert found.get_num_attention_heads() == config["num_attention_heads"]
        assert found.get_num_kv_heads() == config["num_key_value_heads"]
        assert found.get_head_size() * config["num_attention_heads"] == found.get_hidden_size()
    assert llm.apply_model(lambda module: isinstance(module, nn.Module)) == [True]
    engine = llm.llm_engine
    engine.add_request("one", PROMPT, PARAMS)
    assert engine.output_processor.get_num_unfinished_requests() == 1
    assert engine.output_processor.has_unfinished_requests() and not engine.is_sleeping()
    while engine.has_unfinished_requests():
        engine.step()
    assert not engine.output_processor.get_num_unfinished_requests()
    engine.close()


def test_loaded_adapter_is_used_whatever_the_path_of_the_request(model: TextModel, tmp_path: Path) -> None:
    """Catches a read of the placeholder path that trainers give for adapters that are already loaded."""
    config = json.loads((model.path / "config.json").read_text())
    lora = write_adapter(tmp_path / "styled", config, 1)
    llm = open_text(model, enable_lora=True, max_lora_rank=8)
    engine = llm.llm_engine
    assert engine.list_loras() == set() and engine.add_lora(lora)
    assert engine.list_loras() == llm.list_loras() == {1}
    placeholder = LoRARequest(lora.lora_name, lora.lora_int_id, "/nowhere")
    assert tokens(llm, placeholder) == tokens(llm, lora) != tokens(llm)
    assert engine.remove_lora(1) and not engine.remove_lora(1) and not engine.list_loras()
    engine.close()


def test_async_engine_has_the_names_of_vllm(model: TextModel) -> None:
    """Catches a missing name of `EngineClient`, which rollout servers read before the first request."""
    vllm_shim.install()
    from vllm import AsyncEngineArgs, AsyncLLMEngine  # type: ignore[import-not-found]
    from vllm.engine.protocol import EngineClient  # type: ignore[import-not-found]
    from vllm.usage.usage_lib import UsageContext  # type: ignore[import-not-found]

    options = {"model": str(model.path), "dtype": "float32", "num_gpu_blocks_override": 64}
    config = AsyncEngineArgs(**options, max_model_len=64).create_engine_config(UsageContext.ENGINE_CONTEXT)
    assert config.model_config.max_model_len == 64 and config.quant_config is None

    async def run() -> None:
        engine = AsyncLLMEngine.from_vllm_config(config, usage_context=UsageContext.ENGINE_CONTEXT)
        assert isinstance(engine, EngineClient)
        assert engine.is_running and not engine.errored and not engine.is_stopped
        assert await engine.get_supported_tasks() == ("generate",) and not await engine.is_tracing_enabled()
        assert engine.model_config.max_model_len == engine.vllm_config.model_config.max_model_len == 64
        last = None
        async for output in engine.generate(
            prompt=PROMPT, sampling_params=PARAMS, request_id="x", data_parallel_rank=0, trace_headers={}
        ):
            last = output
        assert last is not None and last.finished and not engine.output_processor.has_unfinished_requests()
        await engine.abort(["x"], internal=False)
        await engine.do_log_stats()
        await engine.aclose()
        assert engine.errored and not engine.is_running and "shut down" in str(engine.dead_error)

    asyncio.run(run())


def test_weights_of_the_checkpoint_fit(model: TextModel) -> None:
    """Catches a name of the checkpoint that `load_weights` does not know."""
    llm = open_text(model)
    weights = load_file(model.path / "model.safetensors")
    names = llm.apply_model(lambda module: module.load_weights(weights.items()))[0]
    assert names == set(weights)
    llm.llm_engine.close()
