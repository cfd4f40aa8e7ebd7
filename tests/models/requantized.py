"""Checkpoints of tiny models with weights in some format, and models with the same weights in float32."""

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
"""A layer's name and weight -> its tensors by suffix, and the weight that they stand for."""
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
    """A model directory with packed weights, and transformers' model of the weights that they stand for."""
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
    said = json.loads((path / "config.json").read_text()) | {key: config}
    (path / "config.json").write_text(json.dumps(said))
    return path, twin


def loaded(path: Path, **options: Any) -> Any:
    return load_tiny(path, quant=read_checkpoint(path).quant, **options)


def error_of(model: Any, twin: Any) -> float:
    """How far the logits of two prompts are from the twin's, relative to their size."""
    prompts, errors = random_prompts(17, 10), []
    for ours, ids in zip(run_paged(model, prompts, [[9, 5], [1, 4], [7, 1]]), prompts, strict=True):
        expected = run_hf(twin, ids)
        errors.append(float((ours - expected).norm() / expected.norm()))
    return max(errors)
