"""Pickles in weight files (CVE-2025-24357): torch.load ran any code that the author of a checkpoint had put
into its pytorch_model.bin. Quire reads such files, of models and of adapters, as tensors and nothing
else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny
from tiny import open_tiny

from quire import LoRARequest, SamplingParams
from quire.errors import ConfigError, RequestsFailed


class Trap:
    """Object with a pickle that makes a directory when it is loaded."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.directory,)


def test_model_weights_cannot_run_code(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap(tmp_path / "ran")}, path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin cannot be read as plain weights: [^.]*$"):
        open_tiny(path)
    assert not (tmp_path / "ran").exists()
    torch.load(path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists(), "the file holds no trap"


def test_adapter_weights_cannot_run_code(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    torch.save({name: Trap(tmp_path / "ran")}, adapter / "adapter_model.bin")
    llm = open_tiny(path, enable_lora=True, max_lora_rank=8, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with pytest.raises(RequestsFailed, match=r"adapter_model\.bin cannot be read as plain weights"):
        llm.generate([[5, 6]], params, lora_request=LoRARequest("hers", 1, str(adapter)), use_tqdm=False)
    assert not (tmp_path / "ran").exists()
    (answer,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 2, "the engine answers the next request"
