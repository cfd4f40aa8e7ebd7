"""Tests of the configurations of AWQ and GPTQ."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.quant import METHODS, choose_quant, read_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import Grouped
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


def read(method: str, **keys: Any) -> QuantFacts:
    return METHODS[method](ConfigReader("config.json", keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        {"w_bit": 4, "q_group_size": 128, "version": "GEMM"},
    ],
)
def test_awq(keys: dict[str, Any]) -> None:
    facts = read("awq", **keys, modules_to_not_convert=["visual"])
    assert facts.scheme("model.layers.0.mlp.up_proj") == Grouped(4, 128, False, False, "awq")
    assert facts.scheme("visual.blocks.0.up_proj") is None
    assert choose_quant("awq_marlin", facts) is facts
    with pytest.raises(ConfigError, match="contradicts"):
        choose_quant("gptq", facts)


def test_gptq() -> None:
    facts = read(
        "gptq",
        bits=4,
        group_size=32,
        desc_act=True,
        sym=False,
        dynamic={
            r"-:.*\.mlp\.down_proj": {},
            r"+:.*\.1\.": {"bits": 8, "group_size": -1},
            r"model\.layers\.2": {"sym": True},
            r"-:mlp": {},
            r"layers": {"bits": 2},
        },
    )
    assert facts.scheme("model.layers.0.mlp.up_proj") == Grouped(4, 32, False, True, "gptq")
    assert facts.scheme("model.layers.1.mlp.up_proj") == Grouped(8, -1, False, True, "gptq")
    assert facts.scheme("model.layers.2.mlp.up_proj") == Grouped(4, 32, True, True, "gptq")
    assert facts.scheme("model.layers.1.mlp.down_proj") is None and facts.scheme("lm_head") is None
    second = read("gptq", bits=8, group_size=-1, lm_head=True, checkpoint_format="gptq_v2")
    assert second.scheme("lm_head") == Grouped(8, -1, True, False, "gptq_v2")


@pytest.mark.parametrize(
    ("file", "keys", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "awq"),
        (
            "hf_quant_config.json",
            {"producer": {}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
            "modelopt",
        ),
    ],
)
def test_separate_quantization_config_files(
    file: str, keys: dict[str, Any], method: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(keys))
    facts = read_quant(ConfigReader("config.json", {}), tmp_path)
    assert facts is not None and facts.method == method
    assert facts.scheme("model.layers.0.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("method", "keys", "message"),
    [
        ("awq", {"bits": 4, "version": "gemv"}, 'version "gemm"'),
        ("awq", {"bits": "four"}, "bits is 'four'"),
        ("awq", {"bits": 4, "group_size": "x"}, "group_size is 'x'"),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "gptq and gptq_v2 are"),
        ("gptq", {"bits": 4, "is_marlin_format": True}, "'marlin', which is not supported"),
        ("gptq", {"bits": 4, "dynamic": {"-:(": {}}}, "not a valid pattern"),
        ("gptq", {"bits": 4, "dynamic": []}, None),
    ],
)
def test_invalid_quantization_configs(method: str, keys: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert read(method, **keys).method == method
        return
    with pytest.raises(ConfigError, match=message):
        read(method, **keys)
