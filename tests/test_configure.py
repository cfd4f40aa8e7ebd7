"""Tests of configure(): impossible settings are refused before any slow work."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire import configure as prepare
from quire.configure import configure
from quire.errors import ConfigError

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_backend": "ray"},
        {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2},
        {"max_loras": 0},
        {"speculative_config": {"method": "medusa"}},
        {"max_num_seqs": 0},
        {"no_such_name": 1},
    ],
)
def test_refusal_comes_before_any_download(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "find_model", lambda *args, **more: pytest.fail("looked for the model"))
    with pytest.raises(ConfigError) as refused:
        configure({"model": "org/large"} | settings)
    assert next(iter(settings)) in str(refused.value) and "\n" not in str(refused.value)


def serve_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, config: dict[str, Any], weights: str = ""
) -> None:
    """Serve a hub with one repository; `folder` holds the downloaded files."""
    files = {"config.json": json.dumps(config), "modeling.py": "", **dict.fromkeys(WEIGHTS, weights)}

    def snapshot(repo: str, allow_patterns: list[str], **more: Any) -> str:
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (folder / name).write_text(text)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)


def downloaded(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, {}, "'NobodysForCausalLM' is not supported"),
        ({"quantization_config": {"quant_method": "odd"}}, {}, "quant_method 'odd'"),
        ({}, {"quantization": "gguf"}, "quantization='gguf' is not supported for an unquantized"),
        ({}, {"max_model_len": 512}, "max_model_len=512 is above the 256"),
    ],
)
def test_hub_config_is_checked_before_weights_are_fetched(
    changes: dict[str, Any],
    settings: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches gigabytes that are downloaded only to be refused."""
    serve_hub(monkeypatch, tmp_path / "repo", TINY | changes)
    with pytest.raises(ConfigError, match=words):
        configure({"model": "org/m", "device": "cpu"} | settings)
    assert downloaded(tmp_path / "repo") == {"config.json"}


@pytest.mark.parametrize(
    ("load_format", "fetched"),
    [
        ("auto", {"model.safetensors"}),
        ("safetensors", {"model.safetensors"}),
        ("pt", {"pytorch_model.bin"}),
        ("dummy", set()),
    ],
)
def test_only_weights_of_the_requested_format_are_fetched(
    load_format: str, fetched: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_hub(monkeypatch, tmp_path / "repo", TINY)
    config = configure({"model": "org/m", "device": "cpu", "load_format": load_format})
    assert config.checkpoint.path == tmp_path / "repo"
    assert downloaded(tmp_path / "repo") == {"config.json"} | fetched


@pytest.mark.parametrize(
    ("draft", "draft_settings", "words"),
    [
        ({"vocab_size": 99}, {}, "has a vocabulary of 99 tokens and the target of 320"),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, "speculative_config.kv_cache_dtype='fp8_e4m3'"),
        (
            {},
            {"attention_backend": "FLASHINFER"},
            "attention_backend='FLASHINFER' is not supported with 'AUTO'",
        ),
        ({}, {"quantization": "awq"}, "quantization='awq' is not supported with None in the draft itself"),
    ],
)
def test_draft_config_is_checked_before_its_weights_are_fetched(
    draft: dict[str, Any],
    draft_settings: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TINY))
    serve_hub(monkeypatch, tmp_path / "repo", TINY | draft)
    draft_settings = {"model": "org/d", "num_speculative_tokens": 2} | draft_settings
    settings = {"model": str(tmp_path / "target"), "device": "cpu", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=words):
        configure(settings | {"speculative_config": draft_settings})
    assert downloaded(tmp_path / "repo") == {"config.json"}


@pytest.mark.parametrize("model", ["org/m", "local"])
@pytest.mark.parametrize("draft", [{}, {"model": "org/d"}, {"method": "ngram"}])
def test_settings_are_resolved_once(
    model: str, draft: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_hub(monkeypatch, tmp_path / "repo", TINY)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "config.json").write_text(json.dumps(TINY))
    resolve = Mock(wraps=prepare.resolve)
    monkeypatch.setattr(prepare, "resolve", resolve)
    settings: dict[str, Any] = {
        "model": model if model == "org/m" else str(tmp_path / model),
        "device": "cpu",
    }
    settings |= {"skip_tokenizer_init": True}
    if draft:
        settings |= {"speculative_config": {"num_speculative_tokens": 2, **draft}}
    config = configure(settings)
    assert resolve.call_count == 1 and (config.draft is not None) is ("model" in draft)
    if "org" in model or "model" in draft:
        assert downloaded(tmp_path / "repo") == {"config.json", "model.safetensors"}


def test_quantization_that_only_the_weights_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that hqq itself has saved do not name it in config.json."""
    header = '{"model.layers.0.mlp.up_proj.W_q":{}}'
    weights = len(header).to_bytes(8, "little").decode() + header
    serve_hub(monkeypatch, tmp_path / "repo", TINY, weights)
    config = configure({"model": "org/m", "device": "cpu", "skip_tokenizer_init": True})
    assert config.model.quantization == "hqq" and config.quant is not None


def test_remote_code_is_fetched_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_hub(monkeypatch, tmp_path / "repo", TINY)
    configure({"model": "org/m", "device": "cpu", "load_format": "dummy", "trust_remote_code": True})
    assert downloaded(tmp_path / "repo") == {"config.json", "modeling.py"}


def test_hf_config_path(tmp_path: Path) -> None:
    """It replaces the model's own config, which need not exist."""
    model, config = tmp_path / "model", tmp_path / "config"
    for folder in (model, config):
        folder.mkdir()
    (config / "config.json").write_text(json.dumps(TINY | {"hidden_size": 96}))
    settings = {"model": str(model), "device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="holds neither a config.json"):
        configure(settings)
    resolved = configure(settings | {"hf_config_path": str(config)})
    assert resolved.checkpoint.facts.hidden == 96 and resolved.checkpoint.path == model
    (model / "config.json").write_text(json.dumps(TINY))
    assert configure(settings).checkpoint.facts.hidden == 64
    laid_over = {"hf_config_path": str(config), "hf_overrides": {"max_position_embeddings": 128}}
    resolved = configure(settings | laid_over)
    assert (resolved.checkpoint.facts.hidden, resolved.model.max_model_len) == (96, 128)
    with pytest.raises(ConfigError, match="neither an existing path nor a hub id"):
        configure(settings | {"hf_config_path": str(tmp_path / "nowhere")})


def test_log_names_the_model_its_arguments_and_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the token of the hub is not logged, and that a model of the hub has its id."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    with caplog.at_level("INFO", "quire"):
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "hf_token": "s3"}
        configure({"model": str(tmp_path)} | settings)
    assert f"Model {tmp_path.name} (LlamaForCausalLM): " in caplog.text and "256 tokens, on " in caplog.text
    assert "'load_format': 'dummy'" in caplog.text and "{'top_k': 7}" in caplog.text
    assert "s3" not in caplog.text.replace(str(tmp_path), "")
    serve_hub(monkeypatch, tmp_path / "0f3a9c", TINY)
    with caplog.at_level("INFO", "quire"):
        configure({"model": "org/m", "device": "cpu", "load_format": "dummy"})
    assert "Model org/m (LlamaForCausalLM): " in caplog.text
