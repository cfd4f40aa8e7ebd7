"""Tests of models with an output layer for each task: BGE-M3, ColBERT and SPLADE."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import SETTINGS, texts
from safetensors.torch import load_file, save_file
from tiny_cache import built_once

from quire import LLM, PoolingParams
from quire.errors import ConfigError, RequestError

TOLERANCE = 1e-3
RAW = PoolingParams(use_activation=False)
XLM = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
BERTS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "DistilBert": {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2, "activation": "relu"},
    "ModernBert": {"local_attention": 8, "classifier_activation": "relu", "classifier_bias": True},
    "XLMRoberta": XLM | {"hidden_act": "relu"},
}
"""Families of masked language models, and their settings."""


def opened(path: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4, "use_tqdm_on_load": False}
    return LLM(str(path), **(defaults | settings))


def made(path: Path, name: str, overrides: dict[str, Any]) -> Any:
    """Return a tiny transformers model, saved to `path`."""

    def build(to: Path) -> Any:
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**(SETTINGS | overrides))).float().eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(to)
        return model

    return built_once(("task_heads", name, overrides), path, build)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def add_modules(path: Path, **folders: str) -> None:
    """Write modules.json with modules by name, each with its folder."""
    kinds = [{"path": folder, "type": f"some.library.{kind}"} for kind, folder in folders.items()]
    write(path / "modules.json", kinds)


def normalised(values: torch.Tensor) -> Any:
    return torch.nn.functional.normalize(values, dim=-1).numpy()


@torch.no_grad()
def states(model: Any, ids: list[int]) -> torch.Tensor:
    hidden: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return hidden


def test_dense_sparse_and_token_vectors_of_bge_m3(tmp_path: Path) -> None:
    model = made(tmp_path, "XLMRobertaModel", XLM)
    add_modules(tmp_path, Transformer="", Pooling="1_Pooling", Normalize="2_Normalize")
    write(tmp_path / "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    torch.manual_seed(1)
    sparse, colbert = torch.nn.Linear(32, 1), torch.nn.Linear(32, 32)
    torch.save(sparse.state_dict(), tmp_path / "sparse_linear.pt")
    torch.save(colbert.state_dict(), tmp_path / "colbert_linear.pt")
    llm = opened(tmp_path)
    prompts = [[0, *ids, 2] for ids in texts(5, 30, 1)]
    outputs = {
        task: llm.encode(prompts, pooling_task=task, use_tqdm=False)
        for task in ("embed", "token_embed", "token_classify")
    }
    raw = llm.encode(prompts, RAW, pooling_task="token_classify", use_tqdm=False)
    for place, ids in enumerate(prompts):
        hidden = states(model, ids)
        weights, vectors = sparse(hidden[1:-1]).detach(), colbert(hidden[1:]).detach()
        assert np.abs(outputs["embed"][place].outputs.data - normalised(hidden[0])).max() < TOLERANCE
        assert np.abs(outputs["token_embed"][place].outputs.data - normalised(vectors)).max() < TOLERANCE
        actual = outputs["token_classify"][place].outputs.data
        assert actual.shape == (len(ids) - 2, 1)
        assert np.abs(actual - weights.relu().numpy()).max() < TOLERANCE
        assert np.abs(raw[place].outputs.data - weights.numpy()).max() < TOLERANCE
    with pytest.raises(RequestError, match="its tasks: embed, token_embed, token_classify"):
        llm.classify(prompts)


@pytest.mark.parametrize("family", BERTS)
def test_splade_weights_of_the_vocabulary(family: str, tmp_path: Path) -> None:
    model = made(tmp_path, f"{family}ForMaskedLM", BERTS[family])
    add_modules(tmp_path, MLMTransformer="", SpladePooling="1_SpladePooling")
    llms = {}
    for strategy in ("max", "sum") if family == "Bert" else ("max",):
        write(tmp_path / "1_SpladePooling/config.json", {"pooling_strategy": strategy})
        llms[strategy] = opened(tmp_path)
    prompts = texts(1, 40, 9)
    for strategy, llm in llms.items():
        actual = llm.embed(prompts, use_tqdm=False)
        for ids, item in zip(prompts, actual, strict=True):
            with torch.inference_mode():
                weights = model(torch.tensor([ids])).logits[0].relu().log1p()
            wanted = weights.amax(0) if strategy == "max" else weights.sum(0)
            assert len(item.outputs.embedding) == 96
            assert np.abs(item.outputs.embedding - wanted.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_splade_by_vllms_name_with_an_untied_head(size: int, tmp_path: Path) -> None:
    model = made(tmp_path, "BertForMaskedLM", {"tie_word_embeddings": False})
    weights = load_file(tmp_path / "model.safetensors")
    assert "cls.predictions.decoder.weight" in weights
    settings = {"hf_overrides": {"architectures": ["BertSpladeSparseEmbeddingModel"]}}
    (ids,) = texts(20)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].relu().log1p().amax(0)
    llm = opened(tmp_path, tensor_parallel_size=size, **settings)
    (actual,) = llm.embed([ids], use_tqdm=False)
    assert np.abs(actual.outputs.embedding - wanted.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("layout", ["HF_ColBERT", "ColBERTModernBertModel", "PyLate"])
def test_colbert_vectors_and_late_interaction(layout: str, tmp_path: Path) -> None:
    family = "ModernBert" if "Modern" in layout else "Bert"
    model = made(tmp_path, f"{family}Model", BERTS[family])
    torch.manual_seed(2)
    weight = torch.randn(16, 32)
    if layout == "PyLate":
        add_modules(tmp_path, Transformer="", Dense="1_Dense")
        config = {"in_features": 32, "out_features": 16, "bias": False}
        config |= {"activation_function": "torch.nn.modules.linear.Identity", "use_residual": False}
        write(tmp_path / "1_Dense/config.json", config)
        save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    else:
        prefix = "bert." if family == "Bert" else "model."
        tensors = load_file(tmp_path / "model.safetensors").items()
        tensors = {prefix + name: tensor for name, tensor in tensors} | {"linear.weight": weight}
        save_file(tensors, tmp_path / "model.safetensors")
        config = json.loads((tmp_path / "config.json").read_text())
        write(tmp_path / "config.json", config | {"architectures": [layout], "dim": 16})
    llm = opened(tmp_path)
    prompts = texts(7, 21, 1)
    wanted = [normalised(states(model, ids) @ weight.T) for ids in prompts]
    actual = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    for item, vectors in zip(actual, wanted, strict=True):
        assert np.abs(item.outputs.data - vectors).max() < TOLERANCE
    scores = llm.score(prompts[0], prompts[1:], use_tqdm=False)
    for score, document in zip(scores, wanted[1:], strict=True):
        assert abs(score.outputs.score - (wanted[0] @ document.T).max(1).sum()) < TOLERANCE
    with pytest.raises(RequestError, match="its tasks: token_embed"):
        llm.embed(prompts)


def test_unsupported_settings_are_named(tmp_path: Path) -> None:
    made(tmp_path, "BertForMaskedLM", {})
    add_modules(tmp_path, MLMTransformer="", SpladePooling="1_SpladePooling")
    write(tmp_path / "1_SpladePooling/config.json", {"pooling_strategy": "mean"})
    with pytest.raises(ConfigError, match="pooling_strategy is 'mean', expected max or sum"):
        opened(tmp_path)
    add_modules(tmp_path, Transformer="", SpladePooling="1_SpladePooling")
    with pytest.raises(ConfigError, match="after one MLMTransformer"):
        opened(tmp_path)
    add_modules(tmp_path, Transformer="", Dense="1_Dense")
    sizes = {"in_features": 32, "out_features": 16}
    write(tmp_path / "1_Dense/config.json", sizes | {"use_residual": True})
    with pytest.raises(ConfigError, match="use_residual is True, expected false"):
        opened(tmp_path)
