"""Tests of bidirectional decoders, and of dense layers after pooling, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import make_tiny
from safetensors.torch import save_file
from torch import Tensor, nn

from quire import LLM, PoolingParams
from quire.errors import ConfigError

TOLERANCE = 1e-3
RAW = PoolingParams(use_activation=False)
LENGTHS = (1, 9, 2, 33, 17)
Floats = np.ndarray[Any, Any]


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(1, 96, length).tolist() for length in LENGTHS]


def opened(path: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 48,
        "block_size": 4,
        "num_gpu_blocks_override": 96,
        "use_tqdm_on_load": False,
    }
    return LLM(str(path), **(defaults | settings))


@torch.inference_mode()
def states(model: Any, ids: list[int]) -> Tensor:
    actual: Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return actual


def rewritten(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def add_modules(path: Path, *dense: nn.Linear, activations: tuple[str, ...], pickled: bool = False) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    kinds += [(f"{place}_Dense", "Dense") for place in range(2, 2 + len(dense))]
    kinds += [(f"{2 + len(dense)}_Normalize", "Normalize")]
    modules = [{"path": folder, "type": f"sentence_transformers.models.{kind}"} for folder, kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    for place, (item, activation) in enumerate(zip(dense, activations, strict=True), 2):
        (folder := path / f"{place}_Dense").mkdir()
        config = {
            "in_features": item.in_features,
            "out_features": item.out_features,
            "bias": item.bias is not None,
            "activation_function": f"torch.nn.modules.{activation}",
        }
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {f"linear.{name}": tensor.clone() for name, tensor in item.state_dict().items()}
        if pickled:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[nn.Linear]]:
    """Return an EmbeddingGemma: layers with windows of 4 tokens on either side, and full layers."""
    settings = {"use_bidirectional_attention": True, "sliding_window": 8, "attn_implementation": "eager"}
    path, hf = make_tiny("gemma3_text", tmp_path_factory.mktemp("gemma"), **settings)
    body = path / "body"
    hf.model.save_pretrained(body)
    torch.manual_seed(2)
    hidden = hf.config.hidden_size
    dense = [nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(3 * hidden, 24)]
    add_modules(body, *dense, activations=("linear.Identity", "activation.Tanh"))
    return body, hf.model, dense


def test_embedding_gemma(gemma: tuple[Path, Any, list[nn.Linear]]) -> None:
    path, hf, dense = gemma
    assert json.loads((path / "config.json").read_text())["sliding_window"] == 8
    assert hf.config.sliding_window == 5 and set(hf.config.layer_types) == {
        "full_attention",
        "sliding_attention",
    }
    llm = opened(path)
    assert llm.config.pooling is not None and llm.config.pooling.size == 24
    cache, scheduler = llm.config.cache, llm.config.scheduler
    assert not cache.enable_prefix_caching and not scheduler.enable_chunked_prefill
    for _ in range(2):  # the second run shares nothing with the first
        actual = llm.embed(prompts(), use_tqdm=False)
        for ids, item in zip(prompts(), actual, strict=True):
            with torch.inference_mode():
                wanted = dense[1](dense[0](states(hf, ids).mean(0))).tanh()
                wanted /= wanted.norm()
            assert item.num_cached_tokens == 0
            assert np.abs(np.array(item.outputs.embedding) - wanted.numpy()).max() < TOLERANCE
    tokens = llm.encode(prompts(), RAW, pooling_task="token_embed", use_tqdm=False)
    for ids, every in zip(prompts(), tokens, strict=True):
        with torch.inference_mode():
            wanted = dense[1](dense[0](states(hf, ids))).tanh()
        assert np.abs(every.outputs.data - wanted.numpy()).max() < TOLERANCE


def test_older_module_weights_and_their_checks(
    gemma: tuple[Path, Any, list[nn.Linear]], tmp_path: Path
) -> None:
    _, hf, dense = gemma
    hf.save_pretrained(tmp_path)
    add_modules(tmp_path, dense[0], activations=("linear.Identity",), pickled=True)
    (actual,) = opened(tmp_path).embed([prompts()[1]], RAW, use_tqdm=False)
    with torch.inference_mode():
        wanted = dense[0](states(hf, prompts()[1]).mean(0)).numpy()
    assert np.abs(np.array(actual.outputs.embedding) - wanted).max() < TOLERANCE
    (tmp_path / "2_Dense" / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="no weights in .*2_Dense"):
        opened(tmp_path)
    config = tmp_path / "2_Dense" / "config.json"
    config.write_text(config.read_text().replace('"in_features": ', '"in_features": 1'))
    with pytest.raises(ConfigError, match="2_Dense expects"):
        opened(tmp_path)
    config.write_text(config.read_text().replace("Identity", "Softsign"))
    with pytest.raises(ConfigError, match="activation_function"):
        opened(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps(modules[::-1]))
    with pytest.raises(ConfigError, match="between Pooling and Normalize"):
        opened(tmp_path)


def test_saved_state_includes_the_modules(gemma: tuple[Path, Any, list[nn.Linear]], tmp_path: Path) -> None:
    from quire.cli import main

    path, _, _ = gemma
    flags = ["--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "48"]
    assert main(["save-sharded-state", str(path), "-o", str(tmp_path / "saved"), *flags]) == 0
    actual, saved = (opened(item).embed(prompts(), use_tqdm=False) for item in (path, tmp_path / "saved"))
    for one, other in zip(actual, saved, strict=True):
        assert one.outputs.embedding == other.outputs.embedding


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
def test_config_with_is_causal_false(family: str, tmp_path: Path) -> None:
    path, hf = make_tiny(family, tmp_path, is_causal=False)
    llm = opened(rewritten(path, is_causal=False), runner="pooling")
    actual = llm.encode(prompts(), RAW, pooling_task="token_embed", use_tqdm=False)
    for ids, item in zip(prompts(), actual, strict=True):
        wanted = states(hf.model, ids).numpy()
        assert np.abs(item.outputs.data - wanted).max() < TOLERANCE
    last = llm.embed(prompts(), RAW, use_tqdm=False)
    wanted = states(hf.model, prompts()[3])[-1].numpy()
    assert np.abs(np.array(last[3].outputs.embedding) - wanted).max() < TOLERANCE


def test_llama_bidirectional(tmp_path: Path) -> None:
    """Check mean embeddings, and scores divided by the temperature."""
    import transformers

    path, hf = make_tiny("llama", tmp_path, is_causal=False)
    changes = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "pooling": "avg"}
    rewritten(path, **changes, is_causal=None, temperature=0.02)
    actual = opened(path).embed(prompts(), RAW, use_tqdm=False)
    for ids, item in zip(prompts(), actual, strict=True):
        wanted = states(hf.model, ids).mean(0).numpy()
        assert np.abs(np.array(item.outputs.embedding) - wanted).max() < TOLERANCE
    hf.config.num_labels = 1
    scored = transformers.LlamaForSequenceClassification(hf.config).float().eval()
    scored.model.load_state_dict(hf.model.state_dict())
    scored.save_pretrained(tmp_path / "scored")
    changes["architectures"] = ["LlamaBidirectionalForSequenceClassification"]
    rewritten(tmp_path / "scored", **changes, is_causal=None, temperature=0.5)
    scores = opened(tmp_path / "scored").classify(prompts(), RAW, use_tqdm=False)
    for ids, one in zip(prompts(), scores, strict=True):
        with torch.inference_mode():
            logit = scored.score(states(hf.model, ids).mean(0)) / 0.5
        assert np.abs(np.array(one.outputs.probs) - logit.numpy()).max() < TOLERANCE


def test_eurobert(tmp_path: Path) -> None:
    """Check a Llama with other names and a bidirectional mask."""
    import transformers

    path, hf = make_tiny("llama", tmp_path)
    config = {**hf.config.to_dict(), "model_type": "eurobert", "attn_implementation": "eager"}
    model = transformers.EuroBertModel(transformers.EuroBertConfig(**config)).float().eval()
    model.load_state_dict(hf.model.state_dict())
    model.save_pretrained(path / "euro")
    actual = opened(path / "euro").encode(prompts(), RAW, pooling_task="token_embed", use_tqdm=False)
    for ids, item in zip(prompts(), actual, strict=True):
        assert np.abs(item.outputs.data - states(model, ids).numpy()).max() < TOLERANCE


def test_models_without_bidirectional_attention_are_rejected(tmp_path: Path) -> None:
    llama, _ = make_tiny("llama", tmp_path, is_causal=False)
    both = {"is_causal": False}
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(16\).*both directions reads a whole"):
        opened(llama, runner="pooling", hf_overrides=both, max_num_batched_tokens=16)
    for family, why in (
        ("mistral", "without a defined extent to the right"),
        ("mamba2", "causal layers without attention"),
    ):
        path, _ = make_tiny(family, tmp_path, **({"sliding_window": 8} if family == "mistral" else {}))
        with pytest.raises(ConfigError, match=why):
            opened(path, runner="pooling", hf_overrides=both)
