"""Tests of ModelOpt configurations, and of checkpoints with a format for each layer."""

import functools
from pathlib import Path
from typing import Any

import pytest
from formats import SIZES, STORED, pack_fp8
from requantized import error_of, loaded, requantize
from torch import Tensor

from quire.checkpoint.quant import choose_quant, read_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import BlockFloat, Fp8
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

NVFP4 = BlockFloat("nvfp4", tensor_scale="weight_scale_2")
LAYER = "model.layers.0.mlp.up_proj"


def read(quant_method: str = "modelopt", **config: Any) -> QuantFacts:
    config |= {"quant_method": quant_method}
    facts = read_quant(ConfigReader("config.json", {"quantization_config": config}))
    assert facts is not None
    return facts


@pytest.mark.parametrize(
    ("algo", "scheme"),
    [
        ("FP8", Fp8("tensor", "static")),
        ("fp8_per_channel_per_token", Fp8("channel", "token")),
        ("FP8_PB_WO", Fp8("block", "group")),
        ("NVFP4", NVFP4),
        ("W4A16_NVFP4", NVFP4),
        ("MXFP8", BlockFloat("mxfp8")),
    ],
)
def test_every_algorithm(algo: str, scheme: Any) -> None:
    facts = read(quant_algo=algo, ignore=["lm_head", "language_model.model.layers.1.mlp"])
    assert facts.scheme(LAYER) == facts.main_scheme == scheme
    assert facts.scheme("lm_head") is None and facts.scheme("model.layers.1.mlp.up_proj") is None
    nested = read(quantization={"quant_algo": algo, "exclude_modules": ["model.layers.0*"]})
    assert nested.scheme(LAYER) is None and nested.scheme("model.layers.1.mlp.up_proj") == scheme


def test_other_names_of_the_method() -> None:
    facts = read("modelopt_fp4", quant_algo="NVFP4")
    assert facts.method == "modelopt" and choose_quant("modelopt_fp4", facts) is facts


def test_cache_dtype() -> None:
    assert read(quant_algo="FP8", kv_cache_quant_algo="FP8").cache == "fp8_e4m3"
    assert read(quant_algo="FP8", kv_cache_scheme={"num_bits": 8, "type": "float"}).cache == "fp8_e4m3"
    assert read(quant_algo="FP8", kv_cache_quant_algo="NVFP4").cache is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ', expected one of FP8, .*NVFP4, .* or MIXED"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32, expected 16, the inputs per scale"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers is None, expected an object with"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "INT4"}}},
            "a.b: quant_algo is 'INT4', expected one of FP8",
        ),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "ignore is 'lm_head', expected a list of names"),
    ],
)
def test_unsupported_configs_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**config)


def test_a_format_for_each_layer(tmp_path: Path) -> None:
    """Check fused layers in two formats, experts by their first one, layers that are not listed, and block
    scales that are stored with four axes."""
    layers: dict[str, Any] = {}
    experts = "mlp.experts.{}.{}_proj"
    for i in range(2):
        for part in ("gate", "up", "down"):
            for expert in range(4):
                name = f"model.layers.{i}.{experts.format(expert, part)}"
                layers[name] = {"quant_algo": "NVFP4", "group_size": 16}
        layers[f"model.layers.{i}.self_attn.q_proj"] = {"quant_algo": "FP8"}
        layers[f"model.layers.{i}.self_attn.k_proj"] = {"quant_algo": "MXFP8"}
        layers[f"model.layers.{i}.self_attn.o_proj"] = {"quant_algo": "FP8_PB_WO"}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        algo = layers.get(name, {}).get("quant_algo")
        packers = {"NVFP4": STORED["nvfp4"].pack, "MXFP8": STORED["mxfp8"].pack}
        packers["FP8"] = functools.partial(pack_fp8, "tensor")
        if algo == "FP8_PB_WO":
            tensors, values = pack_fp8("block", name, weight)
            return tensors | {"weight_scale": tensors.pop("weight_scale_inv")[:, None, :, None]}, values
        return packers[algo](name, weight) if algo else ({"weight": weight}, weight)

    path, twin = requantize("qwen3_moe", tmp_path, config, pack, **SIZES["qwen3_moe"])
    model = loaded(path)
    assert error_of(model, twin) < 5e-3
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    assert {"MixedWeight", "Fp8Weight", "BlockFloatWeight", "BlockFloatExperts", "PlainWeight"} <= kinds
