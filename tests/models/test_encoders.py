"""Tests of encoders against transformers: hidden states and classes in batches of texts of any length."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import ENCODERS, Tiny, make, states, texts
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError, RequestError

TOLERANCE = 1e-3
RAW = PoolingParams(use_activation=False)


@pytest.fixture(scope="module", params=ENCODERS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, overrides = ENCODERS[request.param]
    return make(tmp_path_factory.mktemp(family), family, **overrides)


def opened(path: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4, "use_tqdm_on_load": False}
    return LLM(str(path), **(defaults | settings))


def test_hidden_states_match(tiny: Tiny) -> None:
    llm = opened(tiny.path, convert="embed", max_num_batched_tokens=96)
    prompts = texts(1, 40, 7, 62, 3, 23)
    actual = llm.encode(prompts, RAW, pooling_task="token_embed", use_tqdm=False)
    for ids, item in zip(prompts, actual, strict=True):
        assert np.abs(item.outputs.data - states(tiny, ids)).max() < TOLERANCE
    firsts = llm.embed(prompts, RAW, use_tqdm=False)
    for ids, item in zip(prompts, firsts, strict=True):
        wanted = states(tiny, ids)
        wanted = wanted.mean(0) if llm.config.pooling.type == "MEAN" else wanted[0]  # type: ignore[union-attr]
        assert np.abs(item.outputs.embedding - wanted).max() < TOLERANCE


def test_classes_match(tiny: Tiny) -> None:
    llm = opened(tiny.path)
    prompts = texts(9, 1, 30)
    with torch.inference_mode():
        logits = np.stack([tiny.hf(torch.tensor([ids])).logits[0].numpy() for ids in prompts])
    actual = [item.outputs.probs for item in llm.classify(prompts, RAW, use_tqdm=False)]
    assert np.abs(actual - logits).max() < TOLERANCE
    assert llm.config.checkpoint.pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_base_model_with_old_names_and_sentence_transformers_files(tmp_path: Path) -> None:
    tiny = make(tmp_path / "whole", "Bert")
    bare = tmp_path / "bare"
    bare.mkdir()
    config = tiny.hf.config.to_dict() | {"architectures": ["BertModel"]}
    (bare / "config.json").write_text(json.dumps(config))
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in tiny.body.state_dict().items():
        for new, before in old.items():
            name = name.replace(new, before)
        tensors[name] = tensor.contiguous()
    save_file(tensors, bare / "model.safetensors")
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    (bare / "modules.json").write_text(json.dumps(modules))
    (bare / "1_Pooling").mkdir()
    (bare / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    prompts = texts(5, 17)
    actual = opened(bare).embed(prompts, use_tqdm=False)
    for ids, item in zip(prompts, actual, strict=True):
        wanted = states(tiny, ids).mean(0)
        assert np.abs(item.outputs.embedding - wanted / np.linalg.norm(wanted)).max() < TOLERANCE


def test_cross_encoder_reads_pairs(tmp_path: Path) -> None:
    """Check that tokens of the second text have the tokenizer's other type."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tiny = make(tmp_path, "Bert", num_labels=1)
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "one": 4, "two": 5, "three": 6}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    llm = opened(tmp_path, skip_tokenizer_init=False)
    actual = llm.score("one two", ["three", "two one three"], use_tqdm=False)
    for ids, start, item in zip(([1, 4, 5, 2, 6, 2], [1, 4, 5, 2, 5, 4, 6, 2]), (4, 4), actual, strict=True):
        types = [int(place >= start) for place in range(len(ids))]
        with torch.inference_mode():
            logit = tiny.hf(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 0]
        assert item.prompt_token_ids == ids
        assert abs(item.outputs.score - float(logit.sigmoid())) < TOLERANCE
    prompt = {"prompt_token_ids": [1, 4, 2, 5, 2], "token_type_ids": [0, 0, 0, 1, 1]}
    (tokens,) = llm.encode(prompt, RAW, pooling_task="classify", use_tqdm=False)  # type: ignore[arg-type]
    with torch.inference_mode():
        wanted = tiny.hf(
            torch.tensor([prompt["prompt_token_ids"]]),
            token_type_ids=torch.tensor([prompt["token_type_ids"]]),
        ).logits[0]
    assert np.abs(tokens.outputs.data - wanted.numpy()).max() < TOLERANCE


def test_model_with_one_token_type_ignores_types(tmp_path: Path) -> None:
    """Check that the second text's type is not read beyond the table."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tiny = make(tmp_path, "XLMRoberta", pad_token_id=1, type_vocab_size=1, num_labels=1)
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "one": 4, "two": 5}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    llm = opened(tmp_path, skip_tokenizer_init=False)
    (actual,) = llm.score("one", "two", use_tqdm=False)
    with torch.inference_mode():
        logit = tiny.hf(torch.tensor([[0, 4, 2, 5, 2]])).logits[0, 0]
    assert abs(actual.outputs.score - float(logit.sigmoid())) < TOLERANCE
    prompt = {"prompt_token_ids": [0, 4, 2, 5, 2], "token_type_ids": [0, 0, 0, 1, 1]}
    with pytest.raises(RequestError, match="must be zeros: this model has one type"):
        llm.encode(prompt, RAW, pooling_task="classify", use_tqdm=False)  # type: ignore[arg-type]


def test_padding_inside_a_text_has_no_position(tmp_path: Path) -> None:
    tiny = make(tmp_path, "Roberta", pad_token_id=5)
    prompts = [[5, 3, 4, 5, 5, 6, 7], [8, 5], [5], [3, 4, 6]]
    actual = opened(tmp_path).classify(prompts, RAW, use_tqdm=False)
    for ids, item in zip(prompts, actual, strict=True):
        with torch.inference_mode():
            wanted = tiny.hf(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]
        assert np.abs(np.array(item.outputs.probs) - wanted.numpy()).max() < TOLERANCE


def test_older_modernbert_configs_match(tmp_path: Path) -> None:
    """Check configs without layer types and RoPE parameters."""
    tiny = make(tmp_path, "ModernBert", local_attention=8, num_hidden_layers=4)
    today = read_checkpoint(tmp_path).facts
    config = json.loads((tmp_path / "config.json").read_text())
    thetas = {kind: config["rope_parameters"][kind]["rope_theta"] for kind in config["rope_parameters"]}
    del config["rope_parameters"], config["layer_types"]
    config |= {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": thetas["full_attention"],
        "local_rope_theta": thetas["sliding_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(tmp_path).facts == today
    assert [layer.window for layer in today.layers] == [None, 4, 4, None]
    assert tiny.hf.config.sliding_window == 4


@pytest.mark.parametrize("name", ["NomicBertModel", "GteModel", "JinaEmbeddingsV3Model"])
def test_names_written_by_transformers(name: str, tmp_path: Path) -> None:
    """Check that its saved files have the names of the first checkpoints."""
    family, settings = ENCODERS[name]
    tiny = make(tmp_path, family, **settings)
    tensors = {name: tensor.clone() for name, tensor in tiny.body.state_dict().items()}
    older = [item for item in load_file(tmp_path / "model.safetensors") if ".encoder.layer" in item]
    assert older and not any(".encoder.layer" in item for item in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (ids,) = texts(20)
    (actual,) = opened(tmp_path, convert="embed").encode(
        [ids], RAW, pooling_task="token_embed", use_tqdm=False
    )
    assert np.abs(actual.outputs.data - states(tiny, ids)).max() < TOLERANCE


def test_configs_of_older_checkpoints(tmp_path: Path) -> None:
    """Check Nomic's keys, and the NTK-scaled RoPE of the New architecture."""
    nomic = make(tmp_path / "nomic", "NomicBert")
    config = {
        "architectures": ["NomicBertModel"],
        "activation_function": "swiglu",
        "n_embd": 32,
        "n_head": 4,
        "n_inner": 48,
        "n_layer": 2,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "type_vocab_size": 2,
        "qkv_proj_bias": False,
        "vocab_size": 96,
    }
    (tmp_path / "nomic" / "config.json").write_text(json.dumps(config))
    new = make(tmp_path / "new", "Gte", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    config = json.loads((tmp_path / "new" / "config.json").read_text()) | {
        "architectures": ["NewModel"],
        "rope_parameters": None,
        "rope_theta": 100.0,
        "rope_scaling": {"type": "ntk", "factor": 8.0},
    }
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "new" / "model.safetensors").items()
    save_file(
        {name.replace("gte.", "new."): tensor for name, tensor in tensors},
        tmp_path / "new" / "model.safetensors",
    )
    powers = torch.arange(0, 8, 2) / 8
    new.body.rotary_emb.inv_freq = 1 / 800.0**powers / math.pow(8.0, 2 / 8)
    (ids,) = texts(40)
    for tiny in (nomic, new):
        llm = opened(tiny.path, convert="embed")
        (actual,) = llm.encode([ids], RAW, pooling_task="token_embed", use_tqdm=False)
        assert np.abs(actual.outputs.data - states(tiny, ids)).max() < TOLERANCE
    for wrong in ({"activation_function": "gelu"}, {"prenorm": True}, {"num_experts": 8}):
        with pytest.raises(ConfigError):
            opened(tmp_path / "nomic", hf_overrides=wrong)
    with pytest.raises(ConfigError, match="mixed_b"):
        opened(tmp_path / "new", hf_overrides={"rope_scaling": {"mixed_b": 0.3}})


def test_bfloat16_tables_on_a_cpu(tmp_path: Path) -> None:
    """Check that tables keep their stored dtype when a bfloat16 checkpoint is computed in float32."""
    tiny = make(tmp_path, "Bert")
    tiny.hf.to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.hf.float()
    prompts = texts(9, 30)
    actual = opened(tmp_path, convert="embed").embed(prompts, RAW, use_tqdm=False)
    for ids, item in zip(prompts, actual, strict=True):
        assert np.abs(item.outputs.embedding - states(tiny, ids)[0]).max() < TOLERANCE


def test_unsupported_encoder_features_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is_decoder is True, expected false"):
        opened(make(tmp_path, "Bert", is_decoder=True).path)
    tiny = make(tmp_path, "Roberta", pad_token_id=1)
    with pytest.raises(ConfigError, match="does not generate"):
        opened(tiny.path, runner="generate")
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        opened(tiny.path, max_num_batched_tokens=16)
    llm = opened(tiny.path)
    assert llm.config.model.max_model_len == 62, "two positions are not for tokens"
    with pytest.raises(RequestError, match="maximum context length is 62"):
        llm.classify(texts(63))


def test_far_relative_positions(tmp_path: Path) -> None:
    """Check positions beyond 128 tokens, which share one bucket."""
    tiny = make(tmp_path, "MPNet", max_position_embeddings=200, pad_token_id=1)
    prompts = texts(190, 33)
    llm = opened(tmp_path, convert="embed")
    for ids, output in zip(prompts, llm.encode(prompts, RAW, pooling_task="token_embed"), strict=True):
        assert np.abs(output.outputs.data - states(tiny, ids)).max() < TOLERANCE
