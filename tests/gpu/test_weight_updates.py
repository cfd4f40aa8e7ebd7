"""Tests of weight updates on a GPU: under captured graphs, quantized, and by CUDA IPC."""

from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu
SIZE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1024}
PROMPTS = [[7 * i % 900 + 5, 6, *range(20, 30 + 9 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def changed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    return {name: x + 0.5 * x.std() * torch.randn(x.shape, generator=random) for name, x in weights.items()}


def generated_ids(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def opened(path: Path, backend: str, **settings: Any) -> LLM:
    return LLM(
        str(path),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 28,
        weight_transfer_config={"backend": backend},
        **settings,
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model, and the same with other weights."""
    folder = tmp_path_factory.mktemp("updates")
    old, _ = make_tiny("qwen3", folder, **SIZE)
    (new := folder / "new").mkdir()
    (new / "config.json").symlink_to(old / "config.json")
    save_file(changed(load_file(old / "model.safetensors")), new / "model.safetensors")
    return old, new


@pytest.mark.parametrize(
    "settings", [{}, {"enforce_eager": True}, {"quantization": "fp8"}, {"quantization": "int8"}]
)
def test_updated_engine_equals_a_new_one(paths: tuple[Path, Path], settings: dict[str, Any]) -> None:
    old, new = paths
    llm = opened(old, "file", **settings)
    before = generated_ids(llm)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(new)}})
    llm.finish_weight_update()
    after = generated_ids(llm)
    llm.llm_engine.close()
    assert after != before and after == generated_ids(opened(new, "file", **settings))


def hold_weights(path: str, pipe: Connection) -> None:
    """Run a trainer that shares its weights by handles until it is told to end."""
    from torch.multiprocessing.reductions import reduce_tensor

    weights = {name: x.cuda() for name, x in load_file(path).items()}
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    pipe.send(
        {
            "names": list(weights),
            "dtype_names": [str(x.dtype).removeprefix("torch.") for x in weights.values()],
            "shapes": [list(x.shape) for x in weights.values()],
            "ipc_handles": [{uuid: reduce_tensor(x)[1]} for x in weights.values()],
        }
    )
    pipe.recv()


def test_update_by_cuda_ipc(paths: tuple[Path, Path]) -> None:
    old, new = paths
    here, there = get_context("spawn").Pipe()
    trainer = get_context("spawn").Process(
        target=hold_weights, args=(str(new / "model.safetensors"), there), daemon=True
    )
    trainer.start()
    llm = opened(old, "ipc")
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights({"update_info": here.recv()})
    llm.finish_weight_update()
    here.send(None)
    trainer.join(120)
    after = generated_ids(llm)
    llm.llm_engine.close()
    assert after == generated_ids(opened(new, "ipc"))
