"""Tests of quantized Step3 and Step-3.5: experts in one tensor or separate, with clamped activations."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import STORED
from oracle import load_tiny, make_tiny, random_prompts, run_paged
from requantized import loaded
from safetensors.torch import load_file, save_file
from tiny import generate, open_tiny, prompts_of
from torch import Tensor

from quire.checkpoint.quant import ONLINE
from quire.kernels.cpu import native
from quire.layers.moe import ExpertRouter

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "share_expert_dim": 128,
    "attention_other_setting": {"num_attention_heads": 6},
}
SIZES3 = SIZES | {"head_dim": 128, "share_q_dim": 128}
"""Sizes of Step3: blocks of 128 numbers divide the keys, which are one layer with the first query matrix."""


def logits(model: Any) -> Tensor:
    return torch.cat(run_paged(model, random_prompts(17, 10), [[9, 5], [1, 4], [7, 1]]))


def apart(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def pack(path: Path, format: str, *, item: bool) -> Tensor:
    """Store the weights at `path` in a format and return the logits of their values.

    The dequantized model is in a folder `wide` in the same directory.
    """
    config, packer = STORED[format]
    packed, wide = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(path / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not name.endswith(("_proj.weight", ".wq.weight")) or "g_proj" in name:
            packed[name] = wide[name] = weight
        elif weight.ndim == 2:
            tensors, wide[name] = packer(layer, weight)
            packed |= {f"{layer}.{suffix}": tensor.clone() for suffix, tensor in tensors.items()}
        else:
            actual = [packer(layer, expert) for expert in weight]
            wide[name] = torch.stack([numbers for _, numbers in actual])
            where, _, last = layer.rpartition(".")
            for suffix in actual[0][0]:
                parts = [tensors[suffix].clone() for tensors, _ in actual]
                if item:
                    packed |= {f"{where}.experts.{i}.{last}.{suffix}": part for i, part in enumerate(parts)}
                else:
                    packed[f"{layer}.{suffix}"] = torch.stack(parts)
    save_file(wide, path / "model.safetensors")
    shutil.copytree(path, path.parent / "wide")
    expected = logits(load_tiny(path))
    save_file(packed, path / "model.safetensors")
    output = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(output))
    return expected


@pytest.mark.parametrize(("format", "item"), [("fp8 block", False), ("packed", True)])
def test_stored_quantized_experts(format: str, item: bool, tmp_path: Path) -> None:
    """Check scales of experts, and the clamp for quantized weights."""
    path, _ = make_tiny("Step3p5ForCausalLM", tmp_path, **SIZES)
    expected = pack(path, format, item=item)
    assert apart(logits(loaded(path)), expected) < 5e-3


@pytest.mark.parametrize("format", ["fp8 block", "packed"])
def test_stored_quantized_step3(format: str, tmp_path: Path) -> None:
    """Check the scales of the query matrices, which are not sharded alike, and of experts."""
    path, _ = make_tiny("Step3TextForCausalLM", tmp_path, **SIZES3)
    expected = pack(path, format, item=format == "packed")
    assert apart(logits(loaded(path)), expected) < 5e-3


@pytest.mark.parametrize("quant", ["fp8", "int8"])
def test_online_quantization_of_step3(quant: str, tmp_path: Path) -> None:
    path, _ = make_tiny("Step3p5ForCausalLM", tmp_path, **SIZES)
    expected = pack(path, f"{quant} channel", item=False)
    assert apart(logits(load_tiny(tmp_path / "wide", quant=ONLINE[quant])), expected) < 5e-3


def test_routers_are_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    """Check also that its decodes are taped."""
    path, _ = make_tiny("Step3p5ForCausalLM", tmp_path)
    llm = open_tiny(path, dtype="bfloat16")
    generate(llm, prompts_of(5, 9), count=8)
    worker = llm.llm_engine.core.executor._worker  # type: ignore[attr-defined]
    routers = [module for module in worker.model.modules() if isinstance(module, ExpertRouter)]
    x = torch.randn(3, 64).bfloat16()
    assert [router.multiply(x).dtype for router in routers] == [torch.float32] * 2
    assert native.library() is None or any(worker._runner.device._tapes._tapes.values())
