"""Tests of torchao configurations and checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, pack_fp8, pack_int8
from requantized import Pack, error_of, loaded, requantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoint.quant import read_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import Fp8, Grouped, Int8
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError
from quire.quant.int4_layouts import read as read_layout
from quire.quant.sharding import Shard

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
INT8_GROUPED = nested("Int8WeightOnlyConfig", {"group_size": None, "granularity": GROUP})
TILES = {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}
INT4_PAIRS = nested("Int4WeightOnlyConfig", {"group_size": 64, "int4_packing_format": "plain"})
INT4_TILES = nested("Int4WeightOnlyConfig", {"group_size": 64, "int4_packing_format": TILES})
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
        (INT8_GROUPED, Grouped(8, 32, True, False, "torchao")),
        (nested("Int8WeightOnlyConfig", {"group_size": 32}), Grouped(8, 32, True, False, "torchao")),
        (nested("Int4WeightOnlyConfig", {}), Grouped(4, 128, False, False, "torchao_pairs")),
        (INT4_TILES, Grouped(4, 64, False, False, "torchao_tiles")),
        (
            nested("Float8DynamicActivationInt4WeightConfig", {"int4_packing_format": "plain"}, version=1),
            Grouped(4, 128, False, False, "torchao_pairs", "fp8"),
        ),
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
        (nested("Int4WeightOnlyConfig", {"group_size": "all"}), "Int4WeightOnlyConfig of version 2"),
        (nested("Int4WeightOnlyConfig", {}, version=1), "Int4WeightOnlyConfig of version 1"),
        (
            nested("Int4WeightOnlyConfig", {"int4_packing_format": "preshuffled"}),
            "preshuffled.*packed as PLAIN",
        ),
        (nested("Int8DynamicActivationInt8WeightConfig", {"granularity": GROUP}), "PerGroup"),
        (nested("Float8WeightOnlyConfig", {"granularity": GROUP, "weight_dtype": E4M3}), "PerGroup"),
        (nested("IntxWeightOnlyConfig", {"weight_dtype": {"_data": "int9"}, "granularity": ROW}), "int9"),
        ("int8_weight_only", "quant_type is .*, expected an object with the key default"),
        (nested("ModuleFqnToConfig"), "has no fqn_to_config"),
        (nested("ModuleFqnToConfig", {"fqn_to_config": {"a": 1}}), "expected an object with _type and _data"),
    ],
)
def test_unsupported_configs_are_rejected(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings)


def flattened(tensors: dict[str, Tensor], *, is_old: bool = False) -> dict[str, Tensor]:
    """Return tensors under the names of torchao, or of its version 0.14."""
    prefix = "weight:" if is_old else "_weight_"
    return {
        f"{prefix}{'qdata' if name == 'weight' else name[7:]}": tensor for name, tensor in tensors.items()
    }


def pack_unpacked(bits: int, layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize with zeros, in groups of 32, one code to a byte."""
    half = 1 << bits - 1
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / (2 * half - 1)).clamp_min(1e-6)
    zero = (-half - low / scale).round().clamp(-half, half - 1)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(-half, half - 1)
    values = ((codes - zero[..., None]) * scale[..., None]).flatten(1)
    stored = {"weight": codes.flatten(1).to(torch.int8), "weight_scale": scale}
    return stored | {"weight_zero_point": zero.to(torch.int8)}, values


def pack_int8_groups(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(2) / 127
    codes = (groups / scale[..., None]).round()
    stored = {"weight": codes.flatten(1).to(torch.int8), "weight_scale": scale}
    return stored, (codes * scale[..., None]).flatten(1)


def with_float_zeros(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes 0 to 15, and scales and zeros [groups, outputs] for (code - 8) * scale + zero; groups have
    64 inputs."""
    groups = weight.unflatten(1, (-1, 64))
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    codes = ((groups - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15)
    values = ((codes - 8) * scale[..., None] + zero[..., None]).flatten(1)
    return codes.flatten(1).to(torch.int32), scale.t().contiguous(), zero.t().contiguous(), values


def pack_pairs(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack as Int4Tensor: two signed codes to a byte, the first in its lower half."""
    codes, scale, zero, values = with_float_zeros(weight)
    low, high = (codes[:, 0::2] - 8) & 15, (codes[:, 1::2] - 8) & 15
    packed = (low | high << 4).to(torch.uint8).view(torch.int8)
    return {"weight": packed, "weight_scale": scale.bfloat16(), "weight_zero_point": zero.bfloat16()}, values


def tiled(codes: Tensor) -> Tensor:
    """Return codes as the tensor cores of an m16n8k16 product read them, in words of two tiles."""
    outputs, inputs = codes.shape
    tiles, lane, word = torch.meshgrid(
        torch.arange(inputs // 128), torch.arange(32), torch.arange(4), indexing="ij"
    )
    first = tiles * 128 + word * 32 + lane % 4 * 2
    words = torch.zeros(outputs // 8, inputs // 128, 32, 4, dtype=torch.int64)
    for place, offset in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
        words |= codes.view(outputs // 8, 8, inputs)[:, lane // 4, first + offset].long() << 4 * place
    return words.to(torch.int32)


def pack_tiles(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack as Int4TilePackedTo4dTensor, padded to 1024 inputs."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 1024))
    codes, scale, zero, values = with_float_zeros(padded)
    both = torch.stack((scale, zero), 2).bfloat16()
    return {"weight": tiled(codes), "weight_scale_and_zero": both}, values[:, : weight.shape[1]].contiguous()


def by_names(pack: Pack, *, is_old: bool = False) -> Pack:
    def packed(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, values = pack(layer, weight)
        return flattened(tensors, is_old=is_old), values

    return packed


@pytest.mark.parametrize(
    ("settings", "pack", "tolerance"),
    [
        (INT8_ONLY, partial(pack_int8, "channel", False), 2e-3),
        (INT8_GROUPED, pack_int8_groups, 2e-3),
        (FP8_ONLY, partial(pack_fp8, "channel"), 2e-3),
        (GROUPED, partial(pack_unpacked, 4), 6e-3),  # scales of blocks on a CPU have 16 bits
        (INT4_PAIRS, pack_pairs, 6e-3),
        (INT4_TILES, pack_tiles, 6e-3),
    ],
    ids=["int8", "int8 in groups", "fp8", "int4 in groups", "int4 pairs", "int4 tiles"],
)
def test_logits_match_the_dequantized_model(
    settings: Any, pack: Pack, tolerance: float, tmp_path: Path
) -> None:
    path, twin = requantize("llama", tmp_path, config_of(settings), by_names(pack), **SIZES["llama"])
    assert error_of(loaded(path), twin) < tolerance


def test_names_of_version_0_14(tmp_path: Path) -> None:
    path, twin = requantize(
        "llama", tmp_path, config_of(INT4_PAIRS), by_names(pack_pairs, is_old=True), **SIZES["llama"]
    )
    tensors = load_file(path / "model.safetensors")
    plain = {name if ":" in name else f"{name}:_data": tensor for name, tensor in tensors.items()}
    save_file(plain, path / "model.safetensors", {"format": "pt"})
    assert error_of(loaded(path), twin) < 6e-3


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7, 8])
def test_integers_of_other_bits(bits: int) -> None:
    tensors, expected = pack_unpacked(bits, LAYER, torch.randn(8, 64))
    codes, _ = read_layout(Grouped(bits, 32, False, False, "torchao"), tensors, Shard(64))
    torch.testing.assert_close(codes.values(), expected)
    assert codes.bits == (4 if bits <= 4 else 8)


def test_scales_of_inputs_are_named(tmp_path: Path) -> None:
    path, _ = requantize("llama", tmp_path, config_of(INT4_PAIRS), by_names(pack_pairs), **SIZES["llama"])
    tensors = load_file(path / "model.safetensors")
    tensors[f"{LAYER}._weight_act_pre_scale"] = torch.ones(64)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{LAYER}.weight_act_pre_scale is a scale of inputs"):
        loaded(path)


def test_missing_and_odd_tensors_are_named(tmp_path: Path) -> None:
    path, _ = requantize("llama", tmp_path, config_of(INT4_PAIRS), by_names(pack_pairs), **SIZES["llama"])
    tensors = load_file(path / "model.safetensors")
    zero = tensors.pop(f"{LAYER}._weight_zero_point")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"lacks 1 of the .*{LAYER}\.weight_zero_point"):
        loaded(path)
    tensors[f"{LAYER}._weight_zero_point"] = zero.t().contiguous()[:, :0]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{LAYER}\.weight_zero_point has the shape .*configuration says"):
        loaded(path)
