"""Tests of the parameter counts computed from the facts of a model, against the models themselves."""

import re
from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from zoo import STORED, ZOO

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.families import FAMILIES
from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.weights import count_parameters
from quire.errors import ConfigError


@pytest.mark.parametrize("architecture", ZOO)
def test_parameter_count_equals_the_model(architecture: str, tmp_path: Path) -> None:
    """Catches a gate, a tied head, a shared expert or a kind of mixer that is not counted."""
    path, model = make_tiny(architecture, tmp_path, **STORED.get(architecture, {}))
    facts = read_checkpoint(path).facts
    unused = re.compile(facts.unused or "$^")
    numbers = sum(numbers.numel() for name, numbers in model.named_parameters() if not unused.search(name))
    assert count_parameters(facts).total == pytest.approx(numbers, rel=0.03)


FLASH: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "vocab_size": 128896,
    "max_position_embeddings": 262144,
    "sliding_window": 512,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
    "rope_theta": [5000000.0, *[10000.0] * 3] * 12,
    "partial_rotary_factors": [0.5, *[1.0] * 3] * 12,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [*[0.0] * 43, 7.0, 7.0, *[0.0] * 3],
    "swiglu_limits_shared": [*[0.0] * 44, 16.0, *[0.0] * 3],
}
"""Config of Step-3.5-Flash, with lists that have three more entries than there are layers."""


def step(**changes: Any) -> ArchFacts:
    return FAMILIES["Step3p5ForCausalLM"].read(ConfigReader("config.json", FLASH | changes))


def test_step_has_the_published_parameter_count() -> None:
    """196 billion parameters, of which 11 are active per token; also the sizes of each kind of layer."""
    facts = step()
    assert count_parameters(facts).total == pytest.approx(196e9, rel=0.01)
    assert count_parameters(facts).active == pytest.approx(11e9, rel=0.05)
    full, sliding, last = facts.layers[0], facts.layers[1], facts.layers[44]
    assert full.rope is not None and sliding.rope is not None
    assert (full.heads, full.window, full.rope.dim, full.rope.kind) == (0, None, 64, "llama3")
    assert (sliding.heads, sliding.window, sliding.rope.dim, sliding.rope.kind) == (96, 512, 128, "default")
    assert (full.rope.theta, sliding.rope.theta, facts.max_len) == (5e6, 1e4, 262144)
    assert (last.activation, last.expert_activation) == ("silu<16.0", "silu<7.0")
    assert [layer.moe for layer in facts.layers] == [False] * 3 + [True] * 42
    assert facts.moe is not None and facts.moe.routing.scale == 3


STEP3: dict[str, Any] = {
    "vocab_size": 128815,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_attention_groups": 1,
    "head_dim": 256,
    "share_q_dim": 2048,
    "max_seq_len": 65536,
    "max_position_embedding": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "moe_num_experts": 48,
    "moe_top_k": 3,
    "moe_intermediate_size": 5120,
    "share_expert_dim": 5120,
    "norm_expert_weight": False,
}
"""Config of the decoder of Step3, without the list of its MoE layers."""


def step3(**changes: Any) -> ArchFacts:
    return FAMILIES["Step3TextForCausalLM"].read(ConfigReader("config.json", STEP3 | changes))


def test_step3_has_the_published_parameter_count() -> None:
    """316 billion parameters, of which 38 are active per token; all layers but five have experts."""
    facts = step3()
    assert count_parameters(facts).total == pytest.approx(316e9, rel=0.01)
    assert count_parameters(facts).active == pytest.approx(38e9, rel=0.03)
    assert [layer.moe for layer in facts.layers] == [False] * 4 + [True] * 56 + [False]
    assert (facts.kv_heads, facts.query_rank, facts.max_len) == (1, 2048, 65536)
    assert [layer.moe for layer in step3(moe_layers_enum=[0, 60]).layers] == [True, *[False] * 59, True]
    with pytest.raises(ConfigError, match="num_attention_groups is 8, expected 1"):
        step3(num_attention_groups=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups is 4, expected 8"),
        ({"attention_other_setting": {"num_attention_heads": 90}}, "90 attention heads cannot share 8"),
        ({"layer_types": ["full_attention"]}, "expected 45 entries"),
        ({"moe_layers_enum": "3,x"}, "expected numbers of layers"),
        ({"swiglu_limits": [-1.0] * 45}, "expected a bound for each layer"),
        ({"use_head_wise_attn_gate": False}, "expected True"),
    ],
)
def test_invalid_step_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step(**changes)
