"""Checkpoint weight formats: the configuration, and a packer written from each format's documentation."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from group_files import rounded, shuffled, stored, values
from oracle import make_tiny
from requantized import Pack
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoint.quant.schemes import Grouped
from quire.kernels.reference.fp8 import E4M3, Scaled, dequantize, quantize_weight

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256},
    "qwen3_moe": {
        "hidden_size": 128,
        "head_dim": 64,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""Models whose layers every format can store: plain and fused layers, and experts."""


class Stored(NamedTuple):
    """A `quantization_config` and the packer of its tensors."""

    config: dict[str, Any]
    pack: Pack


def compressed(format: str, kind: str, strategy: str, *, static: bool = False) -> dict[str, Any]:
    """Return an 8-bit weight and activation config of llm-compressor."""
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    inputs = weights | {"strategy": "tensor" if static else "token", "dynamic": not static}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def pack_int8(by: str, static: bool, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack as compressed-tensors does; every part of a layer has its own scale."""
    most = weight.abs().amax() if by == "tensor" else weight.abs().amax(1, keepdim=True)
    scale = (most / 127).reshape((1,) if by == "tensor" else (-1, 1))
    codes = (weight / scale).round().clamp(-128, 127)
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scale}
    if static:
        tensors["input_scale"] = torch.rand(1)
    return tensors, codes * scale


def pack_fp8(by: str, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    data, scale = quantize_weight(weight)
    stored = {"weight_scale": scale[:, None]}
    if by == "tensor":
        full = scale.amax()
        data, scale = (weight / full).to(E4M3), full.expand(len(weight))
        stored = {"weight_scale": full, "input_scale": torch.ones(())}
    if by == "block":
        rows, columns = weight.shape
        blocks = weight.view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        data = (blocks / scale[:, None, :, None]).view_as(weight).to(E4M3)
        stored = {"weight_scale_inv": scale}
    return {"weight": data} | stored, dequantize(Scaled(data, scale), torch.float32)


def pack_groups(scheme: Grouped, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    group_of = shuffled(weight.shape[1], scheme.group, generator) if scheme.act_order else None
    codes = rounded(weight, scheme, group_of)
    return stored(codes, scheme, group_of), values(codes, group_of)


NF4 = "-1.0 -0.6961928 -0.52507305 -0.39491749 -0.28444138 -0.18477343 -0.09105004 0.0 0.0795803 0.1609302 0.2461123 0.33791524 0.44070983 0.562617 0.72295684 1.0"  # noqa: E501
FP4 = "0.0 0.00520833 0.66666669 1.0 0.33333334 0.5 0.16666667 0.25 0.0 -0.00520833 -0.66666669 -1.0 -0.33333334 -0.5 -0.16666667 -0.25"  # noqa: E501
TABLES = {name: torch.tensor([float(v) for v in of.split()]) for name, of in (("nf4", NF4), ("fp4", FP4))}


def pack4(kind: str, nested: bool, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack blocks of 64 numbers by rows, two codes per byte, with 8-bit scales around their mean."""
    table, flat = TABLES[kind], weight.flatten()
    blocks = torch.cat((flat, flat.new_zeros(-len(flat) % 64))).view(-1, 64)
    absmax = blocks.abs().amax(1)
    tensors = {"weight.quant_map": table}
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "float32",
        "shape": [*weight.shape],
    }
    tensors["weight.absmax"] = absmax
    if nested:
        offset, around = absmax.mean(), torch.linspace(-1, 1, 256)
        groups = torch.cat((absmax - offset, absmax.new_zeros(-len(absmax) % 256))).view(-1, 256)
        most = groups.abs().amax(1)
        codes = (groups / most[:, None])[:, :, None].sub(around).abs().argmin(2)
        tensors["weight.absmax"] = codes.flatten()[: len(absmax)].to(torch.uint8)
        tensors |= {"weight.nested_absmax": most, "weight.nested_quant_map": around}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        absmax = (around[codes] * most[:, None]).flatten()[: len(absmax)] + offset
    near = (blocks / absmax[:, None])[:, :, None].sub(table).abs().argmin(2)
    wide = (table[near] * absmax[:, None]).flatten()[: len(flat)].view_as(weight)
    pairs = near.flatten()[: len(flat)].to(torch.uint8).view(-1, 2)
    tensors["weight"] = (pairs[:, :1] << 4) | pairs[:, 1:]
    text = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
    return tensors, wide


def pack8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    most = weight.abs().amax(1)
    codes = (weight / most[:, None] * 127).round()
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": most,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * most[:, None] / 127


def bitsandbytes_config(kind: str, nested: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
        "bnb_4bit_quant_type": kind if kind != "int8" else "fp4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": None,
    }


def pack_hqq(bits: int, group: int, axis: int, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack as hqq does: rows of groups (axis 1) or columns (axis 0) with a fractional zero, and several rows
    in an integer, the first in its highest bits."""
    most, per = (1 << bits) - 1, {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    blocks = weight.reshape((-1, group) if axis else (group, -1))
    low, high = blocks.amin(axis, keepdim=True), blocks.amax(axis, keepdim=True)
    scale = ((high - low) / most).half().float()
    zero = (-low / scale).half().float()
    codes = (blocks / scale + zero).round().clamp(0, most)
    rows = torch.cat((codes, codes.new_zeros(-len(codes) % per, codes.shape[1]))).long()
    words = torch.zeros(len(rows) // per, rows.shape[1], dtype=torch.int64)
    for row in rows.view(per, *words.shape):
        words = words << bits | row
    stored = {"W_q": words.to(torch.int32 if bits == 3 else torch.uint8), "scale": scale.half()}
    settings = {"nbits": bits, "group_size": group, "axis": axis, "view_as_float": 0}
    stored |= {"zero": zero.half()} | {key: torch.tensor(value) for key, value in settings.items()}
    return stored, ((codes - zero) * scale).view_as(weight)


def hqq_config(bits: int, group: int | None = 64, axis: int = 1) -> dict[str, Any]:
    """Return the settings as transformers writes them."""
    weights = {"nbits": bits, "channel_wise": True, "group_size": group, "optimize": True}
    weights |= {"round_zero": bits == 4, "axis": axis, "view_as_float": False}
    kinds = {"weight_quant_params": weights, "scale_quant_params": None, "zero_quant_params": None}
    return {
        "quant_method": "hqq",
        "quant_config": kinds | {"offload_meta": False},
        "skip_modules": ["lm_head"],
    }


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack [experts, inputs, outputs] of a plain checkpoint; return blocks, scales and values in that order.

    Two successive numbers share a byte, the first in its low half.
    """
    rows = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2
    codes = (rows[..., None] / 2 ** exponent[..., None] - E2M1).abs().argmin(-1)
    numbers = (E2M1[codes] * 2**exponent).flatten(-2).transpose(1, 2).contiguous()
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponent[..., 0] + 127).to(torch.uint8), numbers


def pack_block_float(
    kind: str, codes_name: str, tensor_scale: str, name: str, weight: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Pack NVFP4, MXFP4 or MXFP8; a scale per tensor that is named `global` is the divisor of the others."""
    largest = 448.0 if kind == "mxfp8" else 6.0
    blocks = weight.unflatten(1, (-1, 16 if kind == "nvfp4" else 32))
    most = blocks.abs().amax(2)
    tensors: dict[str, Tensor] = {}
    if kind == "nvfp4":
        whole = weight.abs().amax() / (largest * 448)
        scales = (most / largest / whole).to(E4M3)
        wide, tensors["weight_scale"] = scales.float() * whole, scales
        tensors[tensor_scale] = (1 / whole)[None] if "global" in tensor_scale else whole
    else:
        exponents = (most / largest).clamp(min=1e-30).log2().ceil()
        wide, tensors["weight_scale"] = 2**exponents, (exponents + 127).to(torch.uint8)
    ratios = (blocks / wide[..., None].clamp(min=1e-30)).flatten(1)
    if kind == "mxfp8":
        tensors[codes_name] = ratios.to(E4M3)
        numbers = tensors[codes_name].float()
    else:
        codes = (ratios[..., None] - E2M1).abs().argmin(-1)
        numbers, tensors[codes_name] = E2M1[codes], (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return tensors, (numbers.view_as(blocks) * wide[..., None]).flatten(1)


def block_float_config(format: str, bits: int, group: int) -> dict[str, Any]:
    """Return a config of llm-compressor for weights and activations in blocks of floats."""
    weights = {"num_bits": bits, "type": "float", "group_size": group, "symmetric": True, "dynamic": False}
    weights["strategy"] = "tensor_group" if group == 16 else "group"
    inputs = weights | {"dynamic": "local" if group == 16 else True}
    groups = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": groups},
        "ignore": ["lm_head"],
    }


def quark_config(weight: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    empty: dict[str, Any] = {"layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"]}
    export = {"kv_cache_group": [], "pack_method": "reorder"}
    return {"quant_method": "quark", "global_quant_config": layer, "export": export} | empty | more


def gpt_oss(folder: Path, intermediate_size: int = 96) -> tuple[Path, Any]:
    """Return a tiny gpt-oss with packed experts and its transformers model with the dequantized values."""
    path, hf_model = make_tiny("gpt_oss", folder, hidden_size=64, intermediate_size=intermediate_size)
    tensors, state = load_file(path / "model.safetensors"), hf_model.state_dict()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, numbers = pack_mxfp4(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(numbers)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": MXFP4}
    (path / "config.json").write_text(json.dumps(config))
    return path, hf_model


AWQ = Grouped(4, 32, symmetric=False, act_order=False, layout="awq")
GPTQ = Grouped(4, 32, symmetric=True, act_order=False, layout="gptq")
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
    "ignore": ["lm_head"],
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def _groups(config: dict[str, Any], scheme: Grouped) -> Stored:
    return Stored(config, functools.partial(pack_groups, scheme))


STORED: dict[str, Stored] = {
    "fp8 tensor": Stored(
        _FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
        functools.partial(pack_fp8, "tensor"),
    ),
    "fp8 channel": Stored(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        functools.partial(pack_fp8, "channel"),
    ),
    "fp8 block": Stored(_FP8 | {"weight_block_size": [128, 128]}, functools.partial(pack_fp8, "block")),
    "fp8 compressed": Stored(
        compressed("float-quantized", "float", "channel"), functools.partial(pack_fp8, "channel")
    ),
    "int8 tensor": Stored(
        compressed("int-quantized", "int", "tensor", static=True),
        functools.partial(pack_int8, "tensor", True),
    ),
    "int8 channel": Stored(
        compressed("int-quantized", "int", "channel"), functools.partial(pack_int8, "channel", False)
    ),
    "awq": _groups(_AWQ, AWQ),
    "gptq": _groups(_GPTQ, GPTQ),
    "gptq act-order": _groups(_GPTQ | {"desc_act": True}, replace(GPTQ, act_order=True)),
    "gptq 8": _groups(_GPTQ | {"bits": 8}, replace(GPTQ, bits=8)),
    "packed": _groups(_PACKED, replace(GPTQ, layout="compressed")),
    "hqq": Stored(hqq_config(4), functools.partial(pack_hqq, 4, 64, 1)),
    "hqq 8": Stored(hqq_config(8), functools.partial(pack_hqq, 8, 64, 1)),
    "nvfp4": Stored(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        functools.partial(pack_block_float, "nvfp4", "weight", "weight_scale_2"),
    ),
    "mxfp4 compressed": Stored(
        block_float_config("mxfp4-pack-quantized", 4, 32),
        functools.partial(pack_block_float, "mxfp4", "weight_packed", ""),
    ),
    "mxfp8": Stored(
        {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]},
        functools.partial(pack_block_float, "mxfp8", "weight", ""),
    ),
    "nf4": Stored(bitsandbytes_config("nf4", nested=True), functools.partial(pack4, "nf4", True)),
    "fp4": Stored(bitsandbytes_config("fp4"), functools.partial(pack4, "fp4", False)),
    "bitsandbytes int8": Stored(bitsandbytes_config("int8"), pack8),
}
NVFP4_COMPRESSED = Stored(
    block_float_config("nvfp4-pack-quantized", 4, 16),
    functools.partial(pack_block_float, "nvfp4", "weight_packed", "weight_global_scale"),
)
"""NVFP4 of llm-compressor, whose scale per tensor is the inverse of ModelOpt's."""
