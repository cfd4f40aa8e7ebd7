"""Tests of Quark configurations, and of checkpoints whose tensors differ from those of other tools."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, pack_block_float, pack_fp8, pack_int8, quark_config
from requantized import Pack, error_of, loaded, requantize
from torch import Tensor

from quire.checkpoint.quant import read_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import BlockFloat, Fp8, Int8
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
INT8 = FP8 | {"dtype": "int8"}
CHANNEL = {"qscheme": "per_channel", "ch_axis": 0}
TOKEN = {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16}
MXFP4 = FP4 | {"group_size": 32, "scale_format": "e8m0"}
NVFP4 = [FP4, FP8 | {"is_scale_quant": True}]
BLOCK = FP8 | {"qscheme": "per_block", "block_size": [128, 128]}
LAYER = "model.layers.0.mlp.up_proj"


def read(weight: Any, inputs: Any = None, **more: Any) -> QuantFacts:
    config = quark_config(weight, inputs, **more)
    facts = read_quant(ConfigReader("config.json", {"quantization_config": config}))
    assert facts is not None
    return facts


@pytest.mark.parametrize(
    ("weight", "inputs", "scheme"),
    [
        (FP8, FP8, Fp8("tensor", "static")),
        (FP8 | CHANNEL, FP8 | TOKEN, Fp8("channel", "token")),
        (FP8, None, Fp8("tensor", "none")),
        (BLOCK, FP8 | TOKEN, Fp8("block", "group", scale_name="weight_scale_inv")),
        (INT8, INT8, Int8("tensor", "static")),
        (INT8 | CHANNEL, INT8 | TOKEN | {"symmetric": False}, Int8("channel", "token", symmetric=False)),
        (MXFP4, None, BlockFloat("mxfp4")),
        (FP4, FP4, BlockFloat("nvfp4", tensor_scale="weight_scale_2")),
        (NVFP4, NVFP4, BlockFloat("nvfp4", tensor_scale="weight_scale_2")),
        ({}, {}, None),
    ],
)
def test_schemes(weight: Any, inputs: Any, scheme: Any) -> None:
    facts = read(weight, inputs)
    assert facts.scheme(LAYER) == scheme and facts.scheme("lm_head") is None


def test_layers_with_other_settings() -> None:
    """Check patterns, the order of the sections, and outputs that are keys and values."""
    key = {"weight": FP8, "input_tensors": FP8, "output_tensors": FP8}
    facts = read(
        FP8,
        FP8,
        layer_quant_config={"*k_proj": key, "*mlp.experts*": {"weight": MXFP4}},
        layer_type_quant_config={"<class 'torch.nn.modules.linear.Linear'>": {"weight": INT8}},
        exclude=["re:.*gate$", "model.layers.1.mlp"],
        export={"kv_cache_group": ["*k_proj", "*v_proj"]},
    )
    assert facts.cache == "fp8_e4m3"
    assert facts.scheme("model.layers.0.self_attn.k_proj") == Fp8("tensor", "static")
    assert facts.scheme("model.layers.0.mlp.experts.0.up_proj") == BlockFloat("mxfp4")
    assert facts.scheme(LAYER) == Int8("tensor", "none")
    assert facts.scheme("model.layers.0.mlp.gate") is None
    assert facts.scheme("model.layers.1.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("weight", "more", "message"),
    [
        (FP4 | {"group_size": 64}, {}, "'fp4', .*'group_size': 64.* not supported; supported are .*16 or 32"),
        (INT8 | {"symmetric": False}, {}, "'int8', .*'symmetric': False"),
        (FP8 | {"dtype": "int4", "qscheme": "per_group"}, {}, "'int4'.* which is not supported"),
        ([FP8, INT8], {}, "'fp8_e4m3'.* which is not supported"),
        ("fp8", {}, "weight is 'fp8', expected an object"),
        (FP8, {"exclude": ["re:("]}, r"'re:\(' is not a pattern"),
        (FP8, {"layer_type_quant_config": {"Embedding": {}}}, "'Embedding'; only linear layers"),
        (FP8, {"layer_quant_config": {"a": {"bias": FP8}}}, "quantized bias are not supported"),
        (FP8, {"layer_quant_config": {"a": {"output_tensors": FP8}}}, "quantized output_tensors are not"),
    ],
)
def test_unsupported_configs_are_rejected(weight: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(weight, **more)


def flat(pack: Pack) -> Pack:
    """Return a packer with scales in one axis, and zero points that are 0."""

    def packed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, wide = pack(name, weight)
        tensors["weight_scale"] = tensors["weight_scale"].flatten()
        return tensors | {"weight_zero_point": torch.zeros(1, dtype=torch.int8)}, wide

    return packed


@pytest.mark.parametrize(
    ("weight", "inputs", "pack"),
    [
        (FP8 | CHANNEL, FP8 | TOKEN, flat(functools.partial(pack_fp8, "channel"))),
        (INT8 | CHANNEL, INT8 | TOKEN, flat(functools.partial(pack_int8, "channel", False))),
        (BLOCK, FP8 | TOKEN, functools.partial(pack_fp8, "block")),
        (NVFP4, NVFP4, functools.partial(pack_block_float, "nvfp4", "weight", "weight_scale_2")),
        (MXFP4, MXFP4, functools.partial(pack_block_float, "mxfp4", "weight", "")),
    ],
    ids=["fp8", "int8", "fp8 block", "nvfp4", "mxfp4"],
)
def test_logits(
    weight: Any, inputs: Any, pack: Pack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, twin = requantize("llama", tmp_path, quark_config(weight, inputs), pack, **SIZES["llama"])
    assert error_of(loaded(path), twin) < 5e-3
    assert "not used" not in caplog.text
