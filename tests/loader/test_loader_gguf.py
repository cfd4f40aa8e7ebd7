"""Weights out of GGUF files, against the transformers model with the same rounding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import load_tiny, make_tiny, random_prompts, run_hf, run_paged, write_gguf

from quire.config.gguf import GGUFFile
from quire.errors import ConfigError
from quire.loader import gguf as loader_gguf
from quire.loader.gguf import hf_name

STEPS = [[9, 5], [1, 4], [7, 1]]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_match_the_model_it_was_written_from(family: str, kind: str, tmp_path: Path) -> None:
    """A wrong name, a block read wrongly, Llama's rows left interleaved (or Qwen's taken apart)."""
    _, hf_model = make_tiny(family, tmp_path)
    path = write_gguf(tmp_path / "m.gguf", hf_model, kind)
    prompts = random_prompts(17, 10)
    for ours, ids in zip(run_paged(load_tiny(path), prompts, STEPS), prompts, strict=True):
        torch.testing.assert_close(ours, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "overrides", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_tied_and_biased_files(overrides: dict[str, Any], tmp_path: Path) -> None:
    _, hf_model = make_tiny("llama", tmp_path, **overrides)
    path = write_gguf(tmp_path / "m.gguf", hf_model)
    ids = random_prompts(12)[0]
    ours = run_paged(load_tiny(path), [ids], [[12]])[0]
    torch.testing.assert_close(ours, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


def test_large_tensors_are_unpacked_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that is lost or put in the wrong place, also across interleaved rows."""
    _, hf_model = make_tiny("llama", tmp_path)
    path = write_gguf(tmp_path / "m.gguf", hf_model, "Q8_0")
    whole = load_tiny(path).state_dict()
    monkeypatch.setattr(loader_gguf, "_CHUNK_WEIGHTS", 64 * 7)
    pieces = load_tiny(path).state_dict()
    assert all(torch.equal(pieces[name], tensor) for name, tensor in whole.items())


def test_a_type_that_cannot_be_unpacked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, hf_model = make_tiny("llama", tmp_path)
    path = write_gguf(tmp_path / "m.gguf", hf_model, "Q8_0")

    def refuse(data: np.ndarray, kind: Any) -> np.ndarray:
        raise NotImplementedError(kind)

    monkeypatch.setattr("gguf.quants.dequantize", refuse)
    with pytest.raises(ConfigError, match=r"m\.gguf: .* is (Q8_0|F32), which cannot be unpacked"):
        load_tiny(path)


def test_a_missing_tensor_is_named_as_a_weight_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hf_model = make_tiny("llama", tmp_path)
    path = write_gguf(tmp_path / "m.gguf", hf_model)
    init = GGUFFile.__init__

    def without_one(self: GGUFFile, path: Path) -> None:
        init(self, path)
        self.tensors.pop("blk.1.ffn_up.weight")

    monkeypatch.setattr(GGUFFile, "__init__", without_one)
    with pytest.raises(ConfigError, match=r"lacks 1 of the .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_tiny(path)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),
        ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_exps.weight"),
    ],
)
def test_names(stored: str, name: str) -> None:
    assert hf_name(stored) == name
