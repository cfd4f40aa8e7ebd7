"""Random LoRA adapters of tiny models, on disk."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from quire import LoRARequest


def write_adapter(path: Path, model: dict[str, Any], seed: int) -> LoRARequest:
    """Write a random adapter for the attention of a tiny Llama."""
    draw, hidden, rank = torch.Generator().manual_seed(seed), model["hidden_size"], 4
    kv = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, size in (("q_proj", hidden), ("v_proj", kv)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=draw)
            tensors[f"{at}.lora_B.weight"] = torch.randn(size, rank, generator=draw)
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(path.name, seed, str(path))


def write_adapter_with_tokens(path: Path, base: Path, new: list[str]) -> None:
    """Write an adapter that adds tokens and repeats the last of them."""
    model = json.loads((base / "config.json").read_text())
    write_adapter(path, model, 7)
    backend = Tokenizer.from_file(str(base / "tokenizer.json"))
    backend.add_tokens(new)
    backend.save(str(path / "tokenizer.json"))
    last = backend.token_to_id(new[-1])
    tensors = load_file(path / "adapter_model.safetensors")
    for name in ("model.embed_tokens", "lm_head"):
        rows = torch.zeros(last + 1, model["hidden_size"])
        rows[model["vocab_size"] :] = torch.randn(last + 1 - model["vocab_size"], model["hidden_size"])
        tensors[f"base_model.model.{name}.weight"] = rows
    save_file(tensors, path / "adapter_model.safetensors")
