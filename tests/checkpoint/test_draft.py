"""Tests of draft models, checked against their target."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.draft import Draft, check_vocabulary, read_draft
from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
GRANITE = LLAMA | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention"],
    "num_hidden_layers": 2,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 8,
}


def checkpoint(folder: Path, config: dict[str, Any]) -> Checkpoint:
    return read_checkpoint(saved(folder, config))


def saved(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / str(len(list(folder.iterdir())))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def read(folder: Path, method: str, **config: Any) -> Draft:
    target = checkpoint(folder, LLAMA)
    return read_draft(method, target, 3, saved(folder, LLAMA | config))


def test_eagle_heads_are_read_under_every_name(tmp_path: Path) -> None:
    usual = read(tmp_path, "eagle3", num_hidden_layers=1, draft_vocab_size=32).facts
    assert usual.drafts is not None and usual.architecture == "Eagle3LlamaForCausalLM"
    assert (usual.drafts.aux_layers, usual.drafts.vocab, len(usual.layers)) == ((2, 6, 9), 32, 1)
    old = read(tmp_path, "eagle", num_hidden_layers=1, architectures=["EagleLlamaModel"]).facts
    assert (
        old.drafts is not None and not old.drafts.aux_layers and old.architecture == "EagleLlamaForCausalLM"
    )


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        ("eagle", {"hidden_size": 32}, "hidden_size is 32, expected 64, the target's"),
        ("eagle3", {"vocab_size": 99, "num_hidden_layers": 1}, "vocab_size is 99, expected 128"),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers is 2, expected 1"),
        ("eagle3", {"num_hidden_layers": 1, "target_hidden_size": 32}, "target_hidden_size is 32"),
        (
            "eagle3",
            {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [2, 12]},
            "numbers of the target's 12 layers",
        ),
        (
            "draft_model",
            GRANITE,
            "GraniteMoeHybridForCausalLM, which has SSM states, and a draft computes tokens twice",
        ),
        ("mtp", {}, "a LlamaForCausalLM has no layers for multi-token prediction"),
    ],
)
def test_mismatched_draft_is_refused(tmp_path: Path, method: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, method, **config)


def test_draft_needs_the_vocabulary_of_its_target(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, LLAMA).facts
    larger = read(tmp_path, "draft_model", vocab_size=160)
    vocabulary = {"a": 0, "b": 1, "c": 2}
    check_vocabulary(larger, target, vocabulary, {"a": 0, "b": 1})
    check_vocabulary(read(tmp_path, "draft_model"), target, None, None)
    with pytest.raises(ConfigError, match="has a vocabulary of 160 tokens and the target of 128"):
        check_vocabulary(larger, target, vocabulary, None)
    with pytest.raises(
        ConfigError, match="token 1 is 'x' in the draft's tokenizer and is 'b' in the target's"
    ):
        check_vocabulary(larger, target, vocabulary, {"a": 0, "x": 1})
    with pytest.raises(
        ConfigError, match="token 3 is 'd' in the draft's tokenizer and does not exist in the target's"
    ):
        check_vocabulary(larger, target, vocabulary, {"d": 3})
