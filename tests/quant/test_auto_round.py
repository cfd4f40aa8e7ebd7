"""Tests of AutoRound configurations, and of checkpoints with other settings for single layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from formats import AWQ, GPTQ, SIZES, pack_groups
from requantized import error_of, loaded, requantize
from torch import Tensor

from quire.checkpoint.quant import choose_quant, read_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import BlockFloat, Grouped
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
LAYER = "model.layers.0.mlp.up_proj"


def read(**config: Any) -> QuantFacts:
    facts = read_quant(ConfigReader("config.json", {"quantization_config": CONFIG | config}))
    assert facts is not None
    return facts


@pytest.mark.parametrize(
    ("packing", "more", "scheme"),
    [
        (None, {}, GPTQ),
        ("auto_round:auto_gptq", {"sym": False, "bits": 8}, replace(GPTQ, symmetric=False, bits=8)),
        ("auto_round:auto_awq", {"sym": False}, AWQ),
        ("auto_round:llm_compressor", {"data_type": "mx_fp"}, BlockFloat("mxfp4", "weight_packed")),
        ("auto_round:llm_compressor", {"data_type": "mx_fp", "bits": 8}, BlockFloat("mxfp8")),
    ],
)
def test_packing_formats(packing: str | None, more: dict[str, Any], scheme: Any) -> None:
    facts = read(packing_format=packing, **more)
    assert facts.scheme(LAYER) == scheme and facts.scheme("lm_head") is None


def test_other_names_of_the_method() -> None:
    facts = read(quant_method="inc")
    assert facts.scheme(LAYER) == GPTQ
    assert choose_quant("inc", facts) is choose_quant("auto-round", facts) is facts


def test_blocks_and_extra_config() -> None:
    extra = {
        "model.language_model.layers.0.mlp.up_proj": {"bits": 8, "group_size": -1, "sym": False},
        r".*layers\.\d+\.mlp\.gate.*": {"bits": 16},
        "lm_head": {"bits": 4},
    }
    facts = read(extra_config=extra, block_name_to_quantize="model.language_model.layers, other.layers")
    assert facts.scheme(LAYER) == Grouped(8, -1, False, False, "gptq")
    assert facts.scheme("model.layers.1.mlp.up_proj") == facts.scheme("lm_head") == facts.main_scheme == GPTQ
    assert facts.scheme("model.layers.1.mlp.gate") is None
    assert facts.scheme("vision.blocks.1.fc1") is None
    assert read(block_name_to_quantize=["model.layers"]).scheme(LAYER) == GPTQ


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"packing_format": "auto_round:gguf"},
            "'auto_round:gguf' .* auto_round:auto_gptq and .* are",
        ),
        ({"data_type": "nv_fp4"}, "the data_type 'nv_fp4' is not supported"),
        ({"bits": None}, "the key bits is missing"),
        ({"extra_config": []}, None),
        ({"extra_config": {"a": 4}}, "expected an object with the settings of each layer"),
        ({"extra_config": {"(": {"bits": 8}}}, r"extra_config has '\(', which is not a valid pattern"),
        ({"block_name_to_quantize": {"a": 1}}, "expected a name or a list of names"),
    ],
)
def test_unsupported_configs_are_rejected(config: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert read(**config).scheme(LAYER) == GPTQ
        return
    with pytest.raises(ConfigError, match=message):
        read(**config)


@pytest.mark.parametrize("scheme", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_logits_of_layers_with_other_settings(scheme: Grouped, tmp_path: Path) -> None:
    """Check fused layers of several formats, and a layer that is not quantized."""
    changes: dict[str, dict[str, Any]] = {
        "model.layers.0.self_attn.k_proj": {"group_size": 64},
        "model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "fp"},
    }
    config = CONFIG | {
        "sym": scheme.symmetric,
        "packing_format": f"auto_round:auto_{scheme.layout}",
        "extra_config": changes,
    }

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        change = changes.get(name, {})
        if "bits" in change:
            return {"weight": weight}, weight
        return pack_groups(replace(scheme, group=change.get("group_size", scheme.group)), name, weight)

    path, twin = requantize("llama", tmp_path, config, pack, **SIZES["llama"])
    model = loaded(path)
    assert error_of(model, twin) < 5e-3
    assert {"MixedWeight", "Int4Linear", "PlainWeight"} <= {type(item).__name__ for item in model.modules()}
