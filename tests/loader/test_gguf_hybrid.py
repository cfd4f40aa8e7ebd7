"""Tests of GGUF files of hybrid, latent and newer families against the safetensors model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import CONVERSIONS, make_tiny_gguf
from gguf_hybrid_files import (
    HYBRID_CONVERSIONS,
    NEMOTRON_MOE,
    bamba,
    fused_experts,
    granite_experts,
    old_qwen3next,
)
from oracle import load_tiny, random_prompts, run_paged
from zoo import ZOO

from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError

STEPS = [[9, 5], [1, 4], [7, 1]]


def check_equal(family: str, tmp_path: Path, **overrides: Any) -> Path:
    """Check that a file gives the logits of the safetensors checkpoint; return the file."""
    path, _ = make_tiny_gguf(family, tmp_path, **overrides)
    prompts = random_prompts(17, 10)
    expected = run_paged(load_tiny(tmp_path / family), prompts, STEPS)
    for actual, logits in zip(run_paged(load_tiny(path), prompts, STEPS), expected, strict=True):
        torch.testing.assert_close(actual, logits, atol=1e-4, rtol=1e-4)
    return path


@pytest.mark.parametrize("family", HYBRID_CONVERSIONS)
def test_logits_are_those_of_the_safetensors_model(family: str, tmp_path: Path) -> None:
    check_equal(family, tmp_path)


@pytest.mark.parametrize(
    ("family", "conversion", "overrides"),
    [
        ("nemotron_h", NEMOTRON_MOE, {}),
        ("qwen3_next", old_qwen3next, {}),
        ("qwen3_5_moe_text", fused_experts, {}),
        ("bamba", bamba, {}),
        ("granitemoehybrid", granite_experts, ZOO["GraniteMoeHybridForCausalLM"].variants["experts-rope"]),
        ("gemma4_text", None, ZOO["Gemma4ForCausalLM"].variants["experts"]),
        ("deepseek_v3", None, {"q_lora_rank": None, "rope_parameters": None}),
        ("minimax_m2", None, ZOO["MiniMaxM2ForCausalLM"].variants["half-turned"]),
    ],
    ids=[
        "experts without gates",
        "qkvz in one tensor",
        "gate and up in one tensor",
        "bamba",
        "granite with experts",
        "gemma 4 with experts",
        "no query latent",
        "half of a head rotated",
    ],
)
def test_other_layouts(
    family: str, conversion: Any, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if conversion is not None:
        monkeypatch.setitem(CONVERSIONS, family, conversion)
    check_equal(family, tmp_path, **overrides)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "deepseek_v3", "nemotron_h"])
def test_packed_weights(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that rows that are repeated, split or joined stay in the file's blocks."""
    monkeypatch.setitem(CONVERSIONS, "nemotron_h", NEMOTRON_MOE)
    path, _ = make_tiny_gguf(family, tmp_path, "Q8_0")
    ids = random_prompts(12)[0]
    expected = run_paged(load_tiny(path), [ids], [[12]])[0]
    actual = run_paged(load_tiny(path, packed=True), [ids], [[12]])[0]
    torch.testing.assert_close(actual, expected, atol=0.2, rtol=0.1)
    assert any(tensor.type == "Q8_0" for tensor in GGUFFile(path).tensors.values())


def test_layers_of_mtp_are_skipped(tmp_path: Path) -> None:
    path, _ = make_tiny_gguf("qwen3_5_moe_text", tmp_path)
    assert len(read_checkpoint(path).facts.layers) == 3
    assert "blk.3.attn_norm.weight" in GGUFFile(path).tensors


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("deepseek_v3", "expert_gating_func", 3, r"expert_gating_func is 3, expected 1 \(softmax\) or 2"),
        ("lfm2", "attention.head_count_kv", [2, 0], r"expected a number, or 3 numbers"),
        ("lfm2", "attention.head_count_kv", ["a", "b", "c"], r"expected a number, or 3 numbers"),
        ("qwen3_next", "ssm.group_count", 3, r"ssm.time_step_rank is 4, expected a multiple of 3"),
        ("granitemoehybrid", "ssm.inner_size", 130, r"ssm.inner_size is 130, expected a multiple of 8"),
        ("deepseek_v3", "attention.key_length_mla", 8, "8 of 8 dimensions of a key rotate"),
        ("gemma3n_text", "attention.shared_kv_layers", 5, "leaves a layer of each kind in front"),
        ("gemma3n_text", "activation_sparsity_scale", [1.0], "expected 5 numbers"),
    ],
)
def test_wrong_values_are_named(
    family: str, key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CONVERSIONS[family]
    wrong = right._replace(keys=lambda config: right.keys(config) | {key: value})
    monkeypatch.setitem(CONVERSIONS, family, wrong)
    path, _ = make_tiny_gguf(family, tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(path)
