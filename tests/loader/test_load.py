"""Tests of loading a directory: present, missing and mismatched weights."""

import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_tiny, make_tiny, random_prompts, run_hf, run_paged
from safetensors.torch import load_file, save_file

from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.safetensors import SafetensorsSource


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, Any]:
    return make_tiny("llama", tmp_path)


def rewrite(path: Path, change: Any) -> None:
    """Apply `change` to the dict of tensors of the model's one file."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def assert_same_logits(path: Path, hf_model: Any, **options: Any) -> None:
    ids = random_prompts(12)[0]
    actual = run_paged(load_tiny(path, **options), [ids], [[12]])[0]
    torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("small", "thread"), [(-1, "quire-load"), (1 << 20, "MainThread")])
def test_only_large_tensors_are_read_by_threads(
    tiny: tuple[Path, Any], small: int, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, fill = set[str](), SafetensorsSource.fill

    def noted(source: SafetensorsSource, target: Target) -> None:
        names.add(threading.current_thread().name.partition("_")[0])
        fill(source, target)

    monkeypatch.setattr("quire.loader.load._SMALL_BYTES", small)
    monkeypatch.setattr(SafetensorsSource, "fill", noted)
    assert_same_logits(*tiny)
    assert names == {thread}


def test_shards_are_read_through_the_index(tiny: tuple[Path, Any]) -> None:
    path, hf_model = tiny
    (path / "model.safetensors").unlink()
    hf_model.save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    assert_same_logits(path, hf_model)


def test_missing_shard_is_named(tiny: tuple[Path, Any]) -> None:
    path, hf_model = tiny
    (path / "model.safetensors").unlink()
    hf_model.save_pretrained(path, max_shard_size="60KB")
    gone = sorted(path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=rf"lacks 1 of the .*{gone.name}"):
        load_tiny(path)


@pytest.mark.parametrize("weight_map", [None, {"a": 3}, {"a": "../../etc/passwd"}])
def test_invalid_index_is_named(tiny: tuple[Path, Any], weight_map: Any) -> None:
    """Check an index that leads out of the model's directory."""
    path, _ = tiny
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: weight_map"):
        load_tiny(path)


def test_pytorch_bin_files_are_read(tiny: tuple[Path, Any]) -> None:
    path, hf_model = tiny
    (path / "model.safetensors").unlink()
    torch.save(hf_model.state_dict(), path / "pytorch_model.bin")
    assert_same_logits(path, hf_model)


@pytest.mark.parametrize("keep", [0, 5, 200, -10])
def test_truncated_file_is_named(tiny: tuple[Path, Any], keep: int) -> None:
    file = tiny[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
        load_tiny(tiny[0])


def test_directory_without_weights_lists_the_expected_files(tiny: tuple[Path, Any]) -> None:
    (tiny[0] / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no weights in .*llama: looked for .*model\.safetensors"):
        load_tiny(tiny[0])


def test_missing_tensors_are_counted_and_the_first_named(tiny: tuple[Path, Any]) -> None:
    """Check that no layer is left with uninitialized memory."""
    rewrite(tiny[0], lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name])
    with pytest.raises(ConfigError, match=r"lacks 9 of the 21 .*model\.layers\.1\..* and 4 more"):
        load_tiny(tiny[0])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("cohere", "model.layers.1.input_layernorm.weight"),
        ("glm4", "model.layers.1.post_mlp_layernorm.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight"),
        ("olmo2", "model.layers.1.self_attn.k_norm.weight"),
        ("opt", "model.decoder.embed_positions.weight"),
    ],
)
def test_missing_and_extra_tensors_of_other_families_are_named(
    family: str,
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    path, _ = make_tiny(family, tmp_path)
    rewrite(path, lambda tensors: tensors.update({f"{name}.extra": torch.zeros(2)}))
    load_tiny(path)
    assert f"1 weights are not used: {name}.extra" in caplog.text
    rewrite(path, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    with pytest.raises(ConfigError, match=rf"{name} has the shape"):
        load_tiny(path)
    rewrite(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=rf"lacks 1 of the .*{name}"):
        load_tiny(path)


def test_checkpoint_of_the_base_model_is_read(tmp_path: Path) -> None:
    """Check GPT-2 as published: without the prefix of the base model, and with its causal mask."""
    path, hf_model = make_tiny("gpt2", tmp_path, tie_word_embeddings=True)

    def published(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)

    rewrite(path, published)
    assert_same_logits(path, hf_model)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "deepseek_v3"])
def test_experts_are_read_from_one_tensor_or_from_one_each(family: str, tmp_path: Path) -> None:
    """Check Qwen3.5 as published and as transformers saves it."""
    path, _ = make_tiny(family, tmp_path)
    ids = random_prompts(12)[0]
    item = run_paged(load_tiny(path), [ids], [[12]])[0]

    def merge(tensors: dict[str, torch.Tensor]) -> None:
        for block in {name.partition(".experts.0.")[0] for name in tensors if ".experts.0." in name}:
            numbers = range(sum(f"{block}.experts.{i}.up_proj.weight" in tensors for i in range(64)))
            gate, up, down = (
                torch.stack([tensors.pop(f"{block}.experts.{i}.{part}_proj.weight") for i in numbers])
                for part in ("gate", "up", "down")
            )
            tensors[f"{block}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
            tensors[f"{block}.experts.down_proj"] = down

    rewrite(path, merge)
    assert torch.equal(run_paged(load_tiny(path), [ids], [[12]])[0], item)


@pytest.mark.parametrize("shape", [(1, 96), (96, 64)])
def test_wrong_shape_is_reported_with_both_shapes(tiny: tuple[Path, Any], shape: tuple[int, int]) -> None:
    """Check a shape that would broadcast without an error, and one with the right number of values."""
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(tiny[0], lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(ConfigError, match=rf"{name} has the shape {re.escape(str(shape))}, .* \(64, 96\)"):
        load_tiny(tiny[0])


@pytest.mark.parametrize(
    ("name", "warned"),
    [("model.layers.0.self_attn.rotary_emb.inv_freq", False), ("vision.tower.weight", True)],
)
def test_unused_tensors_give_a_warning_unless_harmless(
    tiny: tuple[Path, Any],
    name: str,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    rewrite(tiny[0], lambda tensors: tensors.update({name: torch.zeros(2)}))
    load_tiny(tiny[0])
    assert (name in caplog.text) == warned


@pytest.mark.parametrize(("family", "name"), [("glm_moe_dsa", "indexer.wk"), ("glm4_moe", "q_proj")])
def test_mtp_layers_are_skipped(
    family: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that thousands of unused draft tensors give no warning, while others do."""
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    path, _ = make_tiny(family, tmp_path, num_nextn_predict_layers=1)
    rewrite(path, lambda tensors: tensors.update({f"model.layers.2.self_attn.{name}": torch.zeros(2)}))
    load_tiny(path)
    assert "not used" not in caplog.text
    rewrite(path, lambda tensors: tensors.update({f"model.layers.3.{name}": torch.zeros(2)}))
    load_tiny(path)
    assert "1 weights are not used" in caplog.text


def test_head_of_a_tied_model_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    path, hf_model = make_tiny("llama", tmp_path, tie_word_embeddings=True)
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(128, 64)}))
    assert_same_logits(path, hf_model)
    assert "not used" not in caplog.text


def test_dummy_weights_need_only_the_config_and_follow_the_seed(tiny: tuple[Path, Any]) -> None:
    (tiny[0] / "model.safetensors").unlink()
    first, second, other = (load_tiny(tiny[0], load_format="dummy", seed=seed) for seed in (1, 1, 2))
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    changed = [torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)]
    assert not all(changed)
    logits = run_paged(first, [[3, 4, 5]], [[3]])[0]
    assert logits.isfinite().all() and logits.std() > 0


@pytest.mark.parametrize(
    ("load_format", "message"),
    [
        ("safetensor", "unknown load_format 'safetensor'; known: auto, .*did you mean 'safetensors'"),
        ("gguf", "'gguf' does not fit .* a model directory"),
        ("pt", r"no weights in .*pytorch_model\.bin"),
    ],
)
def test_unsuitable_load_format_is_an_error(tiny: tuple[Path, Any], load_format: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tiny(tiny[0], load_format=load_format)


def test_weights_are_cast_to_the_engines_dtype_without_gradients(tiny: tuple[Path, Any]) -> None:
    path, hf_model = tiny
    rewrite(path, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    for parameter in hf_model.parameters():
        parameter.data = parameter.data.half().float()
    model = load_tiny(path)
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in model.parameters())
    assert_same_logits(path, hf_model)
