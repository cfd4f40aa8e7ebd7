"""Tests of llm-compressor configurations and of the layers read by them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, STORED
from requantized import error_of, loaded, requantize
from torch import Tensor

from quire.checkpoint.quant import read_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import Fp8, Grouped, Int8
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError
from quire.logs import warn_once

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
FP8 = INT8 | {"type": "float"}
INT4 = INT8 | {"num_bits": 4, "strategy": "group", "group_size": 128}
TOKEN = {"strategy": "token", "dynamic": True}
TENSOR = {"strategy": "tensor"}


def group(weights: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs} | more


def read(
    *groups: Any, format: str = "int-quantized", key: str = "quantization_config", **more: Any
) -> QuantFacts:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    method = {} if key == "compression_config" else {"quant_method": "compressed-tensors"}
    output = method | {"format": format, "config_groups": named} | more
    facts = read_quant(ConfigReader("config.json", {key: output}))
    assert facts is not None and facts.method == "compressed-tensors"
    return facts


@pytest.mark.parametrize(
    ("format", "weights", "inputs", "scheme"),
    [
        ("int-quantized", INT8, INT8 | TOKEN, Int8("channel", "token")),
        ("int-quantized", INT8 | TENSOR, INT8 | TENSOR, Int8("tensor", "static")),
        (
            "int-quantized",
            INT8,
            INT8 | TOKEN | {"symmetric": False},
            Int8("channel", "token", symmetric=False),
        ),
        ("int-quantized", INT8, None, Int8("channel", "none")),
        ("float-quantized", FP8, FP8 | TOKEN, Fp8("channel", "token")),
        ("float-quantized", FP8 | TENSOR, FP8 | TENSOR, Fp8("tensor", "static")),
        ("naive-quantized", FP8 | TENSOR, None, Fp8("tensor", "none")),
        (
            "float-quantized",
            FP8 | {"strategy": "block", "block_structure": "64x128"},
            FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
            Fp8("block", "group", (64, 128)),
        ),
        ("pack-quantized", INT4, None, Grouped(4, 128, True, False, "compressed")),
        (
            "pack-quantized",
            INT4 | {"symmetric": False, "actorder": "group", "group_size": 32},
            None,
            Grouped(4, 32, False, True, "compressed"),
        ),
        ("pack-quantized", INT4 | {"actorder": "weight"}, None, Grouped(4, 128, True, False, "compressed")),
        ("pack-quantized", INT8, None, Grouped(8, -1, True, False, "compressed")),
        ("pack-quantized", INT4, FP8 | TOKEN, Grouped(4, 128, True, False, "compressed", "fp8")),
        ("pack-quantized", INT4, INT8 | TOKEN, Grouped(4, 128, True, False, "compressed", "int8")),
        ("int-quantized", INT8 | {"num_bits": 4}, INT8 | TOKEN, Int8("channel", "token")),
    ],
)
def test_schemes(format: str, weights: Any, inputs: Any, scheme: Any) -> None:
    for key in ("quantization_config", "compression_config"):
        facts = read(group(weights, inputs), format=format, key=key)
        assert facts.scheme("model.layers.0.mlp.down_proj") == scheme


def test_targets_and_ignored_layers() -> None:
    """Check names that are part of others, classes against names, and patterns within names."""
    facts = read(
        group(INT8, INT8 | TOKEN),
        group(FP8, targets=["re:.*down_proj", "model.layers.1.self_attn.o_proj"], format="float-quantized"),
        ignore=["lm_head", "model.layers.1.mlp.gate", "re:layers.*", "re:.*router$"],
    )
    int8, fp8 = Int8("channel", "token"), Fp8("channel", "none")
    assert facts.scheme("model.layers.1.mlp.gate_proj") == int8
    assert facts.scheme("model.layers.11.self_attn.o_proj") == int8
    assert facts.scheme("model.layers.1.self_attn.o_proj") == fp8
    assert facts.scheme("model.layers.0.mlp.experts.0.down_proj") == fp8
    for name in ("lm_head", "model.layers.1.mlp.gate", "model.layers.3.router"):
        assert facts.scheme(name) is None


def test_kv_cache_scheme() -> None:
    scales = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert read(group(FP8), kv_cache_scheme=scales).cache == "fp8_e4m3"
    assert read(group(FP8), kv_cache_scheme=None).cache is None
    with pytest.raises(ConfigError, match="int keys and values of 8 bits; float of 8 bits are supported"):
        read(group(FP8), kv_cache_scheme=scales | {"type": "int"})


NVFP4 = FP8 | {"num_bits": 4, "strategy": "tensor_group"}


@pytest.mark.parametrize(
    ("groups", "more", "words"),
    [
        ([group(None)], {}, "group_0 stores no weights.*supported are float weights of 8 bits"),
        (
            [group(INT4, INT4 | TOKEN)],
            {"format": "pack-quantized"},
            "weights of 4 bits.*and input_activations",
        ),
        ([group(NVFP4)], {"format": "nvfp4-pack-quantized"}, "by tensor_group.*nvfp4-pack-quantized"),
        ([group(INT4)], {}, "weights of 4 bits .*by group.* in the format 'int-quantized'"),
        ([group(INT8 | {"symmetric": False})], {}, "asymmetric weights of 8 bits"),
        ([group(INT8 | {"strategy": "group", "group_size": 64})], {}, "by group"),
        ([group(INT8, targets=["Embedding"])], {}, "the target 'Embedding' is not supported.*'Linear'"),
        ([group(INT8, targets=["re:("])], {}, r"'re:\(' is not a pattern"),
        ([group(INT8)], {"ignore": "lm_head"}, "ignore is 'lm_head', expected a list"),
        ([], {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights, which is not supported"),
        ([group("int8")], {}, "weights is 'int8', expected an object"),
    ],
)
def test_unsupported_configs_are_rejected(groups: list[Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(*groups, **more)


def test_only_dense_models_are_supported() -> None:
    assert read(sparsity_config={"format": "dense"}, transform_config={}).scheme("a") is None


def test_checkpoint_with_an_ignored_layer(tmp_path: Path) -> None:
    """Check that the ignored layer is stored plain among quantized ones."""
    output = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group(INT8, INT8 | TOKEN)},
        "ignore": ["lm_head", "model.layers.1.mlp.down_proj"],
        "kv_cache_scheme": None,
    }

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if name in output["ignore"]:
            return {"weight": weight}, weight
        scale = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
        codes = (weight / scale).round().clamp(-128, 127)
        return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale

    path, twin = requantize("llama", tmp_path, output, pack)
    model = loaded(path)
    assert error_of(model, twin) < 2e-3
    dtypes = {type(module).__name__ for module in model.modules() if hasattr(module, "parts")}
    assert dtypes == {"Int8Weight", "PlainWeight"}


@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
def test_4_bit_weights_for_8_bit_activations(
    format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check packed codes, and codes in int8; packed ones leave activations unquantized and say so."""
    is_packed = format == "pack-quantized"
    config = STORED["packed" if is_packed else "int8 channel"].config | {"format": format}
    weights = config["config_groups"]["group_0"]["weights"] | {"num_bits": 4}
    config |= {"config_groups": {"group_0": group(weights, INT8 | TOKEN)}}

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if is_packed:
            return STORED["packed"].pack(name, weight)
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scale).round()
        return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale

    warn_once.cache_clear()
    path, twin = requantize("llama", tmp_path, config, pack, **SIZES["llama"])
    assert error_of(loaded(path), twin) < 5e-3
    line = "made for int8 activations, but activations of 4-bit weights stay in the model's dtype"
    assert caplog.text.count(line) == is_packed
