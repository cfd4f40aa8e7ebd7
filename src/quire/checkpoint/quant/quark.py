"""Quark: the settings that AMD's quantizer writes into config.json."""

from collections.abc import Callable
from typing import Any, Literal

from quire.checkpoint.quant.facts import LayerRule, QuantFacts, target_pattern
from quire.checkpoint.quant.schemes import BlockFloat, Fp8, Int8, Scheme
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

METHOD = "quark"
_BLOCK = 128
_FP4 = {16: BlockFloat("nvfp4", tensor_scale="weight_scale_2"), 32: BlockFloat("mxfp4")}
"""Schemes of fp4 weights, by the number of inputs per scale."""
_KNOWN = (
    "supported are weights of fp8_e4m3 (per_tensor, per_channel, per_block of 128 x 128), symmetric int8 "
    "(per_tensor, per_channel) and fp4 (per_group of 16 or 32)"
)


def read_quark(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of all layers and of those in `layer_quant_config`, except those in `exclude`. The
    output format of the layers in `kv_cache_group` is that of the KV cache."""
    export = _section(keys, "export")
    cached = export.names("kv_cache_group")
    layers = _section(keys, "layer_quant_config")
    rules = [LayerRule(target_pattern(name), None) for name in keys.names("exclude")]
    cache = None
    for pattern in layers.values:
        layer = _section(layers, pattern)
        outputs = layer.get("output_tensors")
        if pattern in cached and isinstance(outputs, dict):
            cache = "fp8_e4m3" if outputs.get("dtype") == "fp8_e4m3" else cache
            layer = layer.but(output_tensors=None)
        rules.append(LayerRule(target_pattern(pattern), _read_scheme(layer)))
    types = _section(keys, "layer_type_quant_config")
    for name in types.values:
        if "Linear" not in name:
            raise ConfigError(f"{types.source} has {name!r}; only linear layers are supported")
        rules.append(LayerRule("", _read_scheme(_section(types, name))))
    rules.append(LayerRule("", _read_scheme(_section(keys, "global_quant_config"))))
    return QuantFacts(METHOD, tuple(rules), cache)


def _section(keys: ConfigReader, key: str) -> ConfigReader:
    """Return the object under `key`; empty if the key is missing. Of a list only the first object is
    returned, since the second one describes how the scales of the first are quantized."""
    value: Any = keys.get(key) or {}
    value = value[0] if isinstance(value, list) else value
    if not isinstance(value, dict):
        raise keys.wrong(key, "an object")
    return ConfigReader(f"{keys.source}: {key}", value)


def _read_scheme(layer: ConfigReader) -> Scheme | None:
    for key in ("output_tensors", "bias"):
        if layer.get(key):
            raise ConfigError(f"{layer.source}: quantized {key} are not supported; quantized weights are")
    is_two_level = isinstance(layer.get("weight"), list)
    weight, inputs = _section(layer, "weight"), _section(layer, "input_tensors")
    if not weight.values:
        return None
    read = _BY_DTYPE.get(str(weight.get("dtype")))
    scheme = None if read is None else read(weight, inputs)
    if scheme is None or (is_two_level and not isinstance(scheme, BlockFloat)):
        settings = {key: weight.get(key) for key in ("dtype", "qscheme", "group_size", "symmetric")}
        raise ConfigError(f"{weight.source} has {settings}, which is not supported; {_KNOWN}")
    return scheme


def _fp8(weight: ConfigReader, inputs: ConfigReader) -> Fp8 | None:
    kinds: dict[Any, Literal["tensor", "channel", "block"]]
    kinds = {"per_tensor": "tensor", "per_channel": "channel", "per_block": "block"}
    kind = kinds.get(weight.get("qscheme"))
    if kind is None:
        return None
    if kind == "block":
        size = weight.get("block_size") or weight.get("group_size") or _BLOCK
        rows, columns = size if isinstance(size, list) and len(size) == 2 else (size, size)
        return Fp8("block", "group", (rows, columns), "weight_scale_inv")
    if not inputs.values:
        return Fp8(kind, "none")
    return Fp8(kind, "token" if inputs.get("is_dynamic") else "static")


def _int8(weight: ConfigReader, inputs: ConfigReader) -> Int8 | None:
    kinds: dict[Any, Literal["tensor", "channel"]] = {"per_tensor": "tensor", "per_channel": "channel"}
    kind = kinds.get(weight.get("qscheme"))
    if kind is None or weight.get("symmetric") is False:
        return None
    if not inputs.values:
        return Int8(kind, "none")
    if inputs.get("dtype") != "int8":
        return None
    is_symmetric = inputs.get("symmetric") is not False
    return Int8(kind, "token" if inputs.get("is_dynamic") else "static", is_symmetric)


def _fp4(weight: ConfigReader, inputs: ConfigReader) -> BlockFloat | None:
    return _FP4.get(weight.get("group_size") or 0) if weight.get("qscheme") == "per_group" else None


_BY_DTYPE: dict[str, Callable[[ConfigReader, ConfigReader], Scheme | None]]
_BY_DTYPE = {"fp8_e4m3": _fp8, "int8": _int8, "fp4": _fp4}
