"""Tests of the perplexity of the default model after `quire quantize`."""

import json
from pathlib import Path

import pytest
import torch
from default_model import default_model
from safetensors.torch import load_file, save_file
from test_packed_smollm2 import perplexity
from torch import Tensor

from quire import LLM
from quire.cli import main

pytestmark = pytest.mark.slow
WORSE = {"fp8": 1.04, "int8": 1.03, "int4": 1.5, "gguf-q8_0": 1.01, "gguf-q4_0": 1.3}
"""Limit of the perplexity relative to unquantized weights, which were rounded once already."""


def measure(path: Path) -> float:
    llm = LLM(str(path), dtype="float32", max_model_len=2560, max_num_seqs=8, use_tqdm_on_load=False)
    return perplexity(llm)


@pytest.fixture(scope="module")
def reference() -> float:
    path = default_model()
    return measure(path)


def dequantize_directory(folder: Path, to: Path) -> Path:
    """Return the float32 weights of a compressed-tensors directory."""
    to.mkdir()
    tensors = load_file(folder / "model.safetensors")
    wide = {name: tensor.float() for name, tensor in tensors.items() if ".weight_" not in name}
    for name in tensors:
        module, scale, _ = name.rpartition(".weight_scale")
        if scale:
            wide[f"{module}.weight"] = _dequantize(tensors, module).contiguous()
    save_file(wide, to / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).symlink_to(folder / name)
    return to


def _dequantize(tensors: dict[str, Tensor], module: str) -> Tensor:
    scale = tensors[f"{module}.weight_scale"].float()
    if f"{module}.weight" in tensors:
        return tensors[f"{module}.weight"].float() * scale
    words = tensors[f"{module}.weight_packed"]
    nibbles = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    grouped = (nibbles - 8).view(*scale.shape, -1)
    return (grouped * scale[..., None]).flatten(1)


@pytest.mark.parametrize("kind", WORSE)
def test_perplexity_of_quantized_weights(kind: str, reference: float, tmp_path: Path) -> None:
    """Check the directory as it is served, and its weights dequantized to float32."""
    out = tmp_path / "out"
    assert main(["quantize", "default", "--to", kind, "-o", str(out)]) == 0
    served = [out]
    if not kind.startswith("gguf"):
        served = [dequantize_directory(out, tmp_path / "wide"), out]
    actual = {path.name: measure(path) for path in served}
    print(
        f"\n{kind}: "
        + ", ".join(f"{name} {value:.3f}" for name, value in actual.items())
        + f" of {reference:.3f}"
    )
    for name, value in actual.items():
        assert value / reference < WORSE[kind], (name, value, reference)
