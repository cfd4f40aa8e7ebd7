"""Checkpoints of tiny models in some weight format, and models with the dequantized weights in float32."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from oracle import load_tiny, make_tiny, random_prompts, run_hf, run_paged
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoint.model import read_checkpoint

Pack = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""Function from a layer's name and weight to its tensors by suffix and its dequantized weight."""
LAYERS = r"(_proj|\.w[123])\.weight$"


def requantize(
    family: str,
    folder: Path,
    config: dict[str, Any],
    pack: Pack,
    layers: str = LAYERS,
    key: str = "quantization_config",
    **overrides: Any,
) -> tuple[Path, Any]:
    """Write a model directory with packed weights; return it with transformers' model of the dequantized
    weights.
    """
    path, hf_model = make_tiny(family, folder, **overrides)
    stored, wide = load_file(path / "model.safetensors"), {}
    packed: dict[str, Tensor] = {}
    for name, weight in stored.items():
        wide[name] = weight
        if re.search(layers, name) and weight.ndim == 2:
            layer = name.removesuffix(".weight")
            tensors, wide[name] = pack(layer, weight)
            packed |= {f"{layer}.{suffix}": tensor.clone() for suffix, tensor in tensors.items()}
        else:
            packed[name] = weight
    save_file(wide, path / "model.safetensors", metadata={"format": "pt"})
    twin = type(hf_model).from_pretrained(path, dtype=torch.float32).eval()
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    output = json.loads((path / "config.json").read_text()) | {key: config}
    (path / "config.json").write_text(json.dumps(output))
    return path, twin


def loaded(path: Path, **options: Any) -> Any:
    return load_tiny(path, quant=read_checkpoint(path).quant, **options)


def error_of(model: Any, twin: Any) -> float:
    """Return the relative error of the logits of two prompts against the transformers model."""
    prompts, errors = random_prompts(17, 10), []
    for actual, ids in zip(run_paged(model, prompts, [[9, 5], [1, 4], [7, 1]]), prompts, strict=True):
        expected = run_hf(twin, ids)
        errors.append(float((actual - expected).norm() / expected.norm()))
    return max(errors)
