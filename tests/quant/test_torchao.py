"""Tests of torchao configurations and checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import pack_fp8, pack_int8
from requantized import Pack, error_of, loaded, requantize
from torch import Tensor

from quire.checkpoint.quant import read_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import Fp8, Grouped, Int8
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

LAYER = "model.layers.0.mlp.up_proj"


def nested(kind: str, data: Any = None, version: int = 2) -> dict[str, Any]:
    """Return a setting as torchao writes it."""
    return {"_type": kind, "_version": version, "_data": {} if data is None else data}


ROW, TENSOR, GROUP = (
    nested("PerRow", {"dim": -1}),
    nested("PerTensor"),
    nested("PerGroup", {"group_size": 32}),
)
E4M3 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
INT4 = {"_type": "torch.dtype", "_data": "int4"}
UNPACKED = {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"}
INT8_ONLY = nested("Int8WeightOnlyConfig", {"group_size": None, "granularity": ROW})
FP8_ONLY = nested("Float8WeightOnlyConfig", {"weight_dtype": E4M3, "granularity": ROW})
GROUPED = nested(
    "IntxWeightOnlyConfig", {"weight_dtype": INT4, "granularity": GROUP, "intx_packing_format": UNPACKED}
)


def config_of(settings: Any, **more: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": settings}} | more


def read(settings: Any, **more: Any) -> QuantFacts:
    config = config_of(settings, **more)
    facts = read_quant(ConfigReader("config.json", {"quantization_config": config}))
    assert facts is not None
    return facts


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        (INT8_ONLY, Int8("channel", "none")),
        (nested("Int8WeightOnlyConfig", {"granularity": TENSOR}), Int8("tensor", "none")),
        (
            nested(
                "Int8DynamicActivationInt8WeightConfig",
                {"act_mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}, "granularity": ROW},
            ),
            Int8("channel", "token", symmetric=False),
        ),
        (FP8_ONLY, Fp8("channel", "none")),
        (
            nested(
                "Float8DynamicActivationFloat8WeightConfig",
                {"weight_dtype": E4M3, "granularity": [ROW, ROW]},
            ),
            Fp8("channel", "token"),
        ),
        (
            nested(
                "Float8DynamicActivationFloat8WeightConfig",
                {"weight_dtype": E4M3, "granularity": [TENSOR, TENSOR]},
            ),
            Fp8("tensor", "tensor"),
        ),
        (GROUPED, Grouped(4, 32, False, False, "torchao")),
        (
            nested(
                "Int8DynamicActivationIntxWeightConfig",
                {"weight_dtype": INT4, "weight_granularity": nested("PerAxis", {"axis": 0})},
            ),
            Grouped(4, -1, False, False, "torchao", "int8"),
        ),
    ],
)
def test_schemes(settings: Any, scheme: Any) -> None:
    facts = read(settings, modules_to_not_convert=["lm_head"])
    assert facts.scheme(LAYER) == scheme and facts.scheme("lm_head") is None


def test_settings_of_single_layers() -> None:
    by_name = {LAYER: INT8_ONLY, r"re:.*self_attn\..*": None, "_default": FP8_ONLY}
    facts = read(nested("ModuleFqnToConfig", {"module_fqn_to_config": by_name}, version=1))
    assert facts.scheme(LAYER) == Int8("channel", "none")
    assert facts.scheme("model.layers.1.mlp.up_proj") == Fp8("channel", "none")
    assert facts.scheme("model.layers.1.self_attn.q_proj") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (INT8_ONLY | {"_version": 1}, "Int8WeightOnlyConfig of version 1 .* supported are .* version 2"),
        (nested("Int4WeightOnlyConfig", {"group_size": 128}), "Int4WeightOnlyConfig of version 2"),
        (nested("Int8WeightOnlyConfig", {"group_size": 32}), "'group_size': 32}, which is not supported"),
        (nested("Float8WeightOnlyConfig", {"granularity": GROUP, "weight_dtype": E4M3}), "PerGroup"),
        (nested("IntxWeightOnlyConfig", {"weight_dtype": {"_data": "int3"}, "granularity": ROW}), "int3"),
        ("int8_weight_only", "quant_type is .*, expected an object with the key default"),
        (nested("ModuleFqnToConfig"), "has no fqn_to_config"),
        (nested("ModuleFqnToConfig", {"fqn_to_config": {"a": 1}}), "expected an object with _type and _data"),
    ],
)
def test_unsupported_configs_are_rejected(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings)


def flattened(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of torchao."""
    return {
        f"_weight_{'qdata' if name == 'weight' else name[7:]}": tensor for name, tensor in tensors.items()
    }


def pack_unpacked(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize to 4 bits with zeros, in groups of 32, one code to a byte."""
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).clamp_min(1e-6)
    zero = (-8 - low / scale).round().clamp(-8, 7)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(-8, 7)
    values = ((codes - zero[..., None]) * scale[..., None]).flatten(1)
    stored = {"weight": codes.flatten(1).to(torch.int8), "weight_scale": scale}
    return stored | {"weight_zero_point": zero.to(torch.int8)}, values


def by_names(pack: Pack) -> Pack:
    def packed(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, values = pack(layer, weight)
        return flattened(tensors), values

    return packed


@pytest.mark.parametrize(
    ("settings", "pack", "tolerance"),
    [
        (INT8_ONLY, partial(pack_int8, "channel", False), 2e-3),
        (FP8_ONLY, partial(pack_fp8, "channel"), 2e-3),
        (GROUPED, pack_unpacked, 6e-3),  # scales of blocks on a CPU have 16 bits
    ],
    ids=["int8", "fp8", "int4 in groups"],
)
def test_logits_match_the_dequantized_model(
    settings: Any, pack: Pack, tolerance: float, tmp_path: Path
) -> None:
    path, twin = requantize("llama", tmp_path, config_of(settings), by_names(pack))
    assert error_of(loaded(path), twin) < tolerance
