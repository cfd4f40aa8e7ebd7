"""Tests of weights from GGUF files against the transformers model with the same rounding."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize
from gguf_files import CONVERSIONS, each_expert, gemma3_keys, make_tiny_gguf
from gguf_hybrid_files import HYBRID_CONVERSIONS
from oracle import load_tiny, random_prompts, run_hf, run_paged

from quire.checkpoint.families import GGUF_FAMILIES
from quire.checkpoint.gguf import GGUFFile
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader import gguf as loader_gguf
from quire.loader.gguf_names import hf_name

STEPS = [[9, 5], [1, 4], [7, 1]]


def _pattern_as_a_number(config: Any) -> dict[str, Any]:
    return gemma3_keys(config) | {"attention.sliding_window_pattern": 3}


def _pattern_by_layer(config: Any) -> dict[str, Any]:
    near = [kind == "sliding_attention" for kind in config.layer_types]
    return gemma3_keys(config) | {"attention.sliding_window_pattern": near}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1")),
        *((family, kind) for family in ("qwen2", "qwen3", "qwen3_moe") for kind in ("BF16", "Q4_0")),
    ],
)
def test_logits_match_the_converted_model(family: str, kind: str, tmp_path: Path) -> None:
    """Check names, blocks, and the permutation of Llama's but not of Qwen's rows."""
    path, hf_model = make_tiny_gguf(family, tmp_path, kind)
    prompts = random_prompts(17, 10)
    for actual, ids in zip(run_paged(load_tiny(path), prompts, STEPS), prompts, strict=True):
        torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(CONVERSIONS.keys() - HYBRID_CONVERSIONS.keys()))
def test_every_architecture_as_its_converter_writes_it(family: str, tmp_path: Path) -> None:
    """Check names, keys, norms with or without 1 added, and transposed rows or weights."""
    path, hf_model = make_tiny_gguf(family, tmp_path)
    prompts = random_prompts(17, 10)
    for actual, ids in zip(run_paged(load_tiny(path), prompts, STEPS), prompts, strict=True):
        torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


def test_every_gguf_architecture_has_a_reference_file() -> None:
    made = {made.architecture or name for name, made in CONVERSIONS.items()}
    assert set(GGUF_FAMILIES) == made | {"nemotron_h_moe"}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
        ("dots1", {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_layouts_of_one_architecture(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Check for swapped norms and ignored header keys."""
    path, hf_model = make_tiny_gguf(family, tmp_path, **overrides)
    ids = random_prompts(12)[0]
    actual = run_paged(load_tiny(path), [ids], [[12]])[0]
    torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["bloom", "falcon", "glm4", "gpt_neox", "phi3"])
def test_packed_weights_of_fused_and_reordered_layers(family: str, tmp_path: Path) -> None:
    path, hf_model = make_tiny_gguf(family, tmp_path, "Q8_0")
    ids = random_prompts(12)[0]
    actual = run_paged(load_tiny(path, packed=True), [ids], [[12]])[0]
    torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=0.2, rtol=0.1)


@pytest.mark.parametrize(
    "overrides", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_tied_and_biased_files(overrides: dict[str, Any], tmp_path: Path) -> None:
    path, hf_model = make_tiny_gguf("llama", tmp_path, **overrides)
    ids = random_prompts(12)[0]
    actual = run_paged(load_tiny(path), [ids], [[12]])[0]
    torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"pieces": each_expert}),
        ("qwen2_moe", {"change": lambda name, values, config: values}),
        ("gemma3_text", {"settings": {"query_pre_attn_scalar": 16}, "keys": _pattern_as_a_number}),
        ("gemma3_text", {"settings": {"query_pre_attn_scalar": 16}, "keys": _pattern_by_layer}),
    ],
    ids=["an expert by itself", "the shared gate as a matrix", "window pattern", "windows by layer"],
)
def test_other_layouts_of_the_same_file(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONVERSIONS, family, CONVERSIONS[family]._replace(**changes))
    path, hf_model = make_tiny_gguf(family, tmp_path)
    ids = random_prompts(12)[0]
    actual = run_paged(load_tiny(path), [ids], [[12]])[0]
    torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Check for block scales, gate or up of another expert."""
    path, hf_model = make_tiny_gguf("gpt_oss", tmp_path, "MXFP4")
    assert GGUFFile(path).tensors["blk.0.ffn_up_exps.weight"].type == "MXFP4"
    ids = random_prompts(12)[0]
    expected = run_hf(hf_model, ids)
    for packed, tolerance in ((False, 1e-4), (True, 2e-3)):
        actual = run_paged(load_tiny(path, packed=packed), [ids], [[12]])[0]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def split(path: Path) -> list[Path]:
    """Split the file into three parts, with metadata in the first and no tensor in the second."""
    reader = GGUFReader(path)
    writers = [GGUFWriter(path.with_name(f"s-0000{i}-of-00003.gguf"), "llama") for i in (1, 2, 3)]
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writers[0].add_key_value(field.name, field.contents(), field.types[0])
    writers[0].add_int32("split.tensors.count", len(reader.tensors))
    for i, tensor in enumerate(reader.tensors):
        writers[i % 2 * 2].add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return sorted(path.parent.glob("s-*.gguf"))


def test_split_file_is_read_completely(tmp_path: Path) -> None:
    """Check that tensors are read from the right part, and that a missing part is an error."""
    path, _ = make_tiny_gguf("llama", tmp_path, "Q8_0")
    full, (first, middle, last) = load_tiny(path).state_dict(), split(path)
    for part_path in (first, last):
        parts = load_tiny(part_path).state_dict()
        assert all(torch.equal(parts[name], tensor) for name, tensor in full.items())
    middle.unlink()
    with pytest.raises(
        ConfigError, match=r"one of 3 parts; missing in the same directory: s-00002-of-00003\.gguf"
    ):
        GGUFFile(first)


def test_every_type_of_the_gguf_package_is_loaded(tmp_path: Path) -> None:
    kinds = [kind for kind in GGMLQuantizationType if kind in _type_traits or kind.name in ("F32", "F16")]
    path, rng, sizes = tmp_path / "all.gguf", np.random.default_rng(0), GGML_QUANT_SIZES
    writer, made = GGUFWriter(path, "llama"), {}
    for kind in kinds:
        made[kind] = rng.integers(0, 60, (3, 512 // sizes[kind][0] * sizes[kind][1]), dtype=np.uint8)
        writer.add_tensor(kind.name, made[kind], raw_shape=made[kind].shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = SimpleNamespace(
        path=path, facts=SimpleNamespace(architecture="LlamaForCausalLM", state=None)
    )
    source: Any = loader_gguf.GGUFSource(cast(Any, checkpoint), 0)
    for kind, content in made.items():
        target = torch.empty(3, 512)
        source.fill(Target(kind.name, target))
        assert np.array_equal(target.numpy(), dequantize(content, kind), equal_nan=True), kind.name
    assert len(kinds) > 20


def test_large_tensors_are_dequantized_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for lost or misplaced pieces, also with permuted rows."""
    path, _ = make_tiny_gguf("llama", tmp_path, "Q8_0")
    full = load_tiny(path).state_dict()
    monkeypatch.setattr(loader_gguf, "_CHUNK_WEIGHTS", 64 * 7)
    pieces = load_tiny(path).state_dict()
    assert all(torch.equal(pieces[name], tensor) for name, tensor in full.items())


def test_unsupported_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = make_tiny_gguf("llama", tmp_path, "Q8_0")

    def refuse(data: np.ndarray, kind: Any) -> np.ndarray:
        raise NotImplementedError(kind)

    monkeypatch.setattr("gguf.quants.dequantize", refuse)
    with pytest.raises(ConfigError, match=r"m\.gguf: .* is (Q8_0|F32), which cannot be dequantized"):
        load_tiny(path)


def test_missing_tensor_is_named_as_a_weight_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = make_tiny_gguf("llama", tmp_path)
    init = GGUFFile.__init__

    def without_one(self: GGUFFile, path: Path) -> None:
        init(self, path)
        self.tensors.pop("blk.1.ffn_up.weight")

    monkeypatch.setattr(GGUFFile, "__init__", without_one)
    with pytest.raises(ConfigError, match=r"lacks 1 of the .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_tiny(path)


@pytest.mark.parametrize(
    ("stored", "name", "architecture"),
    [
        ("blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias", "LlamaForCausalLM"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight", "LlamaForCausalLM"),
        ("output_norm.weight", "model.norm.weight", "LlamaForCausalLM"),
        ("output.weight", "lm_head.weight", "LlamaForCausalLM"),
        ("blk.0.ffn_up.bias", "transformer.h.0.mlp.c_fc.bias", "GPT2LMHeadModel"),
        ("rope_freqs.weight", "rope_freqs.weight", "LlamaForCausalLM"),
        ("blk.0.new_part.weight", "blk.0.new_part.weight", "LlamaForCausalLM"),
        ("blk.0.attn_rot_embd.weight", "blk.0.attn_rot_embd.weight", "LlamaForCausalLM"),
        ("blk.0.ffn_up_exps.weight", "model.layers.0.mlp.experts.up_proj.weight", "LlamaForCausalLM"),
        ("blk.3.ffn_up.12.weight", "model.layers.3.mlp.experts.12.up_proj.weight", "LlamaForCausalLM"),
        ("blk.0.attn_sinks.weight", "model.layers.0.self_attn.sinks", "GptOssForCausalLM"),
    ],
)
def test_tensor_names(stored: str, name: str, architecture: str) -> None:
    assert hf_name(stored, architecture) == name


def quantize_nvfp4(blocks: Any) -> Any:
    """Return blocks of 64 numbers in the bytes of NVFP4, which the package cannot write."""
    from gguf.quants import NVFP4

    parts = blocks.reshape(-1, 4, 16)
    scales = NVFP4.fp32_to_ue4m3(np.abs(parts).max(-1) / 6)
    ratios = parts / np.maximum(NVFP4.ue4m3_to_fp32(scales), 1e-9)[..., None]
    codes = np.abs(ratios[..., None] - np.array(NVFP4.kvalues)).argmin(-1).astype(np.uint8)
    pairs = codes[..., :8] | codes[..., 8:] << 4
    return np.concatenate([scales, pairs.reshape(-1, 32)], 1)


@pytest.mark.parametrize("scale", [None, 1.0, 0.5])
def test_nvfp4_weights(scale: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check packed and dequantized weights. A file with scales in other tensors is refused."""

    class Writer(GGUFWriter):
        def write_header_to_file(self, *args: Any) -> None:
            if scale is not None:
                self.add_tensor("blk.0.attn_q.scale", np.array([scale], np.float32))
            super().write_header_to_file(*args)

    monkeypatch.setattr("gguf.quants.NVFP4.quantize_blocks", staticmethod(quantize_nvfp4))
    monkeypatch.setattr("gguf_files.GGUFWriter", Writer)
    path, hf_model = make_tiny_gguf("llama", tmp_path, "NVFP4", intermediate_size=128)
    assert any(tensor.type == "NVFP4" for tensor in GGUFFile(path).tensors.values())
    if scale == 0.5:
        with pytest.raises(ConfigError, match="attn_q.weight is NVFP4 with a scale in blk.0.attn_q.scale"):
            load_tiny(path)
        return
    ids = random_prompts(12)[0]
    for packed in (False, True):
        actual = run_paged(load_tiny(path, packed=packed), [ids], [[12]])[0]
        torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=2e-3, rtol=1e-3)
