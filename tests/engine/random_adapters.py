"""LoRA adapters with random weights for the projections of a Llama."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import LoRARequest

PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


def write_adapter(path: Path, model: dict[str, Any], rank: int) -> None:
    """Write one adapter with random weights on all seven projections of a Llama."""
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    kv = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    sizes = {
        "self_attn": {"q_proj": (hidden, hidden), "k_proj": (hidden, kv), "v_proj": (hidden, kv)},
        "mlp": {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)},
    }
    sizes["self_attn"]["o_proj"] = hidden, hidden
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for half, names in sizes.items():
            for name, (size_in, size_out) in names.items():
                at = f"base_model.model.model.layers.{layer}.{half}.{name}"
                tensors[f"{at}.lora_A.weight"] = 0.02 * torch.randn(rank, size_in, dtype=torch.bfloat16)
                tensors[f"{at}.lora_B.weight"] = 0.02 * torch.randn(size_out, rank, dtype=torch.bfloat16)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(PROJECTIONS)}
    (path / "adapter_config.json").write_text(json.dumps(config))


def write_adapters(folder: Path, model: dict[str, Any], rank: int, count: int) -> list[LoRARequest]:
    """Write one adapter and link its files `count` times, each under its own name."""
    write_adapter(folder / "1", model, rank)
    for number in range(2, count + 1):
        shutil.copytree(folder / "1", folder / str(number), copy_function=os.link)
    return [LoRARequest(f"a{number}", number, str(folder / str(number))) for number in range(1, count + 1)]
