"""Tests of the models and settings that cannot return experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny

from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.config.engine import resolve
from quire.config.machine import Machine
from quire.errors import ConfigError

MACHINE = Machine("cpu", "cpu", 1, 1 << 34, 1 << 34, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(make_tiny("qwen3_moe", tmp_path_factory.mktemp("model"))[0])


def with_layers(checkpoint: Checkpoint, **fields: Any) -> Checkpoint:
    layers = tuple(replace(layer, **fields) for layer in checkpoint.facts.layers)
    return replace(checkpoint, facts=replace(checkpoint.facts, layers=layers))


@pytest.mark.parametrize(
    ("settings", "layer", "words"),
    [
        ({}, {"moe": False}, "Qwen3MoeForCausalLM has no mixture of experts"),
        ({}, {"window": 8}, "needs a layer with full attention"),
        ({"pipeline_parallel_size": 2}, {}, "needs pipeline_parallel_size=1, got 2"),
        ({"runner": "pooling", "convert": "embed"}, {}, "a pooling model returns no tokens"),
        ({"kv_offloading_dir": "."}, {}, "move cached prompts without their experts: leave them out"),
    ],
)
def test_reasons_are_named(
    settings: dict[str, Any], layer: dict[str, Any], words: str, checkpoint: Checkpoint
) -> None:
    args = {"model": str(checkpoint.path), "enable_return_routed_experts": True} | settings
    with pytest.raises(ConfigError, match=f"enable_return_routed_experts is not supported here: .*{words}"):
        resolve(args, checkpoint=with_layers(checkpoint, **layer), machine=MACHINE)


def test_a_window_longer_than_all_sequences_is_full_attention(checkpoint: Checkpoint, tmp_path: Path) -> None:
    args = {"model": str(checkpoint.path), "enable_return_routed_experts": True, "max_model_len": 64}
    config = resolve(args, checkpoint=with_layers(checkpoint, window=64), machine=MACHINE)
    assert config.extensions.enable_return_routed_experts
