"""Tests of `quire quantize`: rounding, storage, copied files and rejected inputs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import load_tiny, make_tiny, random_prompts, run_paged
from safetensors.torch import load_file
from tiny_text import VOCAB, TextModel, text_model
from torch import Tensor
from zoo import LLAMA3, TIED

from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.model import read_checkpoint
from quire.cli import main
from quire.quantize import compressed
from quire.quantize.schemes import SCHEMES
from quire.text.tokenizer import load_tokenizer

STEPS = {"fp8": 32 / 448, "int8": 1 / 127, "int4": 1 / 7}
"""Largest step between adjacent values, relative to the largest weight of a row or group."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def quantize(source: Path, kind: str, to: Path, *more: str) -> Path:
    assert main(["quantize", str(source), "--to", kind, "-o", str(to), *more]) == 0
    return to


def unpacked(tensors: dict[str, Tensor], module: str) -> Tensor:
    """Return the dequantized weight, according to the documented layout."""
    scale = tensors[f"{module}.weight_scale"].double()
    if f"{module}.weight" in tensors:
        return tensors[f"{module}.weight"].double() * scale
    outputs, inputs = tensors[f"{module}.weight_shape"].tolist()
    words = tensors[f"{module}.weight_packed"].tolist()
    values = [[(word >> shift & 15) - 8 for word in row for shift in range(0, 32, 4)] for row in words]
    grouped = torch.tensor(values, dtype=torch.float64).view(outputs, scale.shape[1], -1)
    return (grouped * scale[..., None]).view(outputs, inputs)


@pytest.mark.parametrize("kind", SCHEMES)
def test_weights_are_rounded_to_nearest_and_the_rest_stays(
    kind: str, text: TextModel, tmp_path: Path
) -> None:
    """Check the order of nibbles, the scales of rows and groups, and unquantized embeddings and norms."""
    out = quantize(text.path, kind, tmp_path / "out")
    before, after = load_file(text.path / "model.safetensors"), load_file(out / "model.safetensors")
    rounded = {name.removesuffix(".weight_scale") for name in after if name.endswith("_scale")}
    assert rounded == {name.removesuffix(".weight") for name in before if name.endswith("_proj.weight")}
    for module in rounded:
        weight = before[f"{module}.weight"].double()
        group = 32 if kind == "int4" else weight.shape[1]
        largest = weight.unflatten(1, (-1, group)).abs().amax(-1, keepdim=True)
        apart = (unpacked(after, module) - weight).unflatten(1, (-1, group)).abs()
        assert (apart <= largest * STEPS[kind] / 2 * 1.08).all(), module
    for name in before.keys() - {f"{module}.weight" for module in rounded}:
        assert torch.equal(before[name], after[name])
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert config["hidden_size"] == 64
    assert load_tokenizer(out, "hf").encode("a fox") == load_tokenizer(text.path, "hf").encode("a fox")
    assert (out / "generation_config.json").read_text() == (text.path / "generation_config.json").read_text()


def test_four_bits_by_hand() -> None:
    """Check eight numbers per word, the first in its lowest bits, with 8 added; a scale per group."""
    weight = torch.tensor([[-7.5, 7.0, 0.0, 1.0, -1.0, 2.0, -2.0, 3.0] + [0.0] * 7 + [15.0]])
    parts = SCHEMES["int4"].pack(weight, 8, torch.float32)
    assert parts["weight_packed"].tolist() == [[0xB6A798F0 - (1 << 32), 0xF8888888 - (1 << 32)]]
    assert parts["weight_scale"].tolist() == [[1.0, 2.0]]
    assert parts["weight_shape"].tolist() == [1, 16]


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    path, _ = make_tiny("qwen3_moe", tmp_path)
    out = quantize(path, "int8", tmp_path / "out", "--ignore", r"layers\.1\.self_attn\.[qk]_proj")
    after = load_file(out / "model.safetensors")
    assert "model.layers.0.mlp.experts.1.down_proj.weight_scale" in after
    left = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    attention = [f"model.layers.1.self_attn.{name}_proj" for name in "kq"]
    gates = [f"model.layers.{i}.mlp.gate" for i in range(2)]
    assert left == sorted(["lm_head", "model.embed_tokens", *gates, *attention])
    assert not {f"{name}.weight_scale" for name in left} & after.keys()


def test_ssm_gates_are_not_quantized(tmp_path: Path) -> None:
    """Check also that no group size has to divide the small rank."""
    path, _ = make_tiny("mamba", tmp_path)
    out = quantize(path, "int4", tmp_path / "out")
    rounded = {
        name.split(".")[-2] for name in load_file(out / "model.safetensors") if name.endswith("_scale")
    }
    assert rounded == {"in_proj", "out_proj"}
    ids = random_prompts(9)
    model = load_tiny(out, quant=read_checkpoint(out).quant)
    assert run_paged(model, ids, [[9]])[0].isfinite().all()


def test_large_models_become_several_files(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = load_file(quantize(text.path, "int8", tmp_path / "one") / "model.safetensors")
    monkeypatch.setattr(compressed.Files.__init__, "__defaults__", (30_000,))
    out = quantize(text.path, "int8", tmp_path / "several")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == full.keys() and len(set(index.values())) > 2
    for name, file in index.items():
        assert torch.equal(load_file(out / file)[name], full[name])


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", LLAMA3), ("llama", {"attention_bias": True}), ("mistral", {}), ("qwen2", TIED), ("qwen3", {})],
    ids=["llama3", "biases", "mistral", "tied", "qwen3"],
)
def test_directory_becomes_a_gguf_file(
    family: str, settings: dict[str, Any], text: TextModel, tmp_path: Path
) -> None:
    """Check names, keys, RoPE scaling, head order and the tokenizer."""
    path, _ = make_tiny(family, tmp_path, vocab_size=VOCAB, sliding_window=None, **settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(text.path / name, path)
    (file,) = quantize(path, "gguf-q8_0", tmp_path / "out").glob("*-Q8_0.gguf")
    ids = random_prompts(60)[0]
    expected, actual = (run_paged(load_tiny(item), [ids], [[60]])[0] for item in (path, file))
    assert (actual - expected).norm() < 0.05 * expected.norm()
    before, after = load_tokenizer(path, "hf"), load_tokenizer(file, "gguf")
    output = "It's 1234 naïve cafés!\n\n<|im_start|>日本語 🙂"
    assert after.encode(output) == before.encode(output)
    assert (after.chat_template, after.eos_token) == (before.chat_template, before.eos_token)
    assert GGUFFile(file).metadata["tokenizer.ggml.pre"] == "gpt-2"


def test_gguf_file_becomes_another_and_a_directory(text: TextModel, tmp_path: Path) -> None:
    """Check header, tokenizer, weights and sampling defaults through both formats."""
    model = shutil.copytree(text.path, tmp_path / "model")
    sampling = {"temperature": 0.0, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    stored = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(stored | sampling))
    (file,) = quantize(model, "gguf-q8_0", tmp_path / "8").glob("*.gguf")
    (four,) = quantize(file, "gguf-q4_0", tmp_path / "4").glob("*-Q4_0.gguf")
    types = {name: tensor.type for name, tensor in GGUFFile(four).tensors.items()}
    assert {types["output.weight"], types["token_embd.weight"]} == {"Q8_0"}
    assert types["blk.0.attn_q.weight"] == "Q4_0" and types["blk.0.attn_norm.weight"] == "F32"
    same = GGUFFile(file).metadata | {"general.file_type": 2}
    np.testing.assert_equal(GGUFFile(four).metadata, same)
    out = quantize(file, "int8", tmp_path / "out")
    before, after = load_file(text.path / "model.safetensors"), load_file(out / "model.safetensors")
    for module in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"):
        weight = before[f"{module}.weight"].double()
        assert (unpacked(after, module) - weight).norm() < 0.02 * weight.norm()
    config = json.loads((out / "config.json").read_text())
    original = json.loads((text.path / "config.json").read_text())
    for key in ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert config[key] == pytest.approx(original[key])
    assert load_tokenizer(out, "hf").encode("The café") == load_tokenizer(text.path, "hf").encode("The café")
    assert load_tokenizer(out, "hf").chat_template == load_tokenizer(text.path, "hf").chat_template
    for path in (file, four, out):
        assert read_checkpoint(path).generation == sampling


@pytest.mark.parametrize(
    ("family", "kind", "more", "output"),
    [
        ("llama", "int4", ["--group-size", "128"], "groups of 128 do not divide; use --group-size 32"),
        ("llama", "int8", ["--group-size", "128"], "--group-size is for --to int4"),
        ("llama", "int4", ["--group-size", "12"], "must be a multiple of 8"),
        ("llama", "int8", ["--ignore", "."], "nothing is left to quantize"),
        ("gpt2", "fp8", [], "inputs before outputs"),
        ("gpt_oss", "fp8", [], "holds all experts in one tensor"),
        ("gemma2", "gguf-q8_0", [], "cannot be written for a Gemma2ForCausalLM; known: LlamaForCausalLM"),
        ("llama", "gguf-q8_0", [], "no tokenizer in"),
    ],
)
def test_unsupported_outputs_are_rejected_and_leave_no_files(
    family: str, kind: str, more: list[str], output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = make_tiny(family, tmp_path)
    out = tmp_path / "out"
    assert main(["quantize", str(path), "--to", kind, "-o", str(out), *more]) == 1
    assert output in capsys.readouterr().err
    assert not out.exists()


def test_nonempty_directories_and_quantized_models_are_rejected(
    text: TextModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = quantize(text.path, "int8", tmp_path / "out")
    assert main(["quantize", str(text.path), "--to", "int8", "-o", str(out)]) == 1
    assert "not an empty directory" in capsys.readouterr().err
    assert main(["quantize", str(out), "--to", "int8", "-o", str(tmp_path / "again")]) == 1
    assert "is quantized already" in capsys.readouterr().err
