"""compressed-tensors: the settings that llm-compressor writes into config.json."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from quire.checkpoint.quant.facts import LayerRule, QuantFacts, target_pattern
from quire.checkpoint.quant.schemes import BlockFloat, Fp8, Grouped, Int8, Scheme
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

METHOD = "compressed-tensors"
_LINEAR = "Linear"
"""The only layer class that can be quantized."""
_PACKED = "pack-quantized"
_FORMATS = (_PACKED, "int-quantized", "float-quantized", "naive-quantized")
_BLOCK_FLOATS: dict[tuple[Any, ...], BlockFloat] = {
    ("nvfp4-pack-quantized", 4, "tensor_group", 16): BlockFloat(
        "nvfp4", "weight_packed", "weight_global_scale", is_divisor=True
    ),
    ("mxfp4-pack-quantized", 4, "group", 32): BlockFloat("mxfp4", "weight_packed"),
    ("mxfp8-quantized", 8, "group", 32): BlockFloat("mxfp8"),
}
"""Schemes by format, bits, strategy and group size. Activations are not quantized."""
_DENSE = (None, "dense")
_KNOWN = (
    "supported are float weights of 8 bits by tensor, channel or block, symmetric int weights of 4 or 8 bits "
    f"by tensor or channel, int weights of 4 or 8 bits by group or channel in {_PACKED} with "
    "input_activations of 8 bits or none, and symmetric float weights in nvfp4-pack-quantized (groups of "
    "16), mxfp4-pack-quantized and mxfp8-quantized (groups of 32)"
)
_IN_ORDER = (None, False, "weight", "static")
"""Values of actorder with which each group consists of consecutive inputs."""


def read_compressed(keys: ConfigReader) -> QuantFacts:
    """Read the config groups of compressed-tensors. Each has a scheme for its target layers; layers in
    `ignore` are not quantized."""
    for key, content in (("sparsity_config", "sparse weights"), ("transform_config", "transformed weights")):
        value = keys.get(key)
        if value and not (
            isinstance(value, dict) and value.get("format", value.get("config_groups")) in _DENSE
        ):
            raise ConfigError(
                f"{keys.source}: {key} has {content}, which is not supported; "
                "use a checkpoint that is quantized alone, or the dense one"
            )
    rules = [LayerRule(target_pattern(name), None) for name in keys.names("ignore")]
    by_name, by_class = [], []
    for group in _read_groups(keys):
        scheme = _read_scheme(group, group.get("format") or keys.get("format"))
        for target in group.names("targets"):
            if target == _LINEAR:
                by_class.append(LayerRule("", scheme))
            elif re.fullmatch(r"[A-Z]\w*", target):
                raise ConfigError(
                    f"{group.source}: the target {target!r} is not supported; supported are {_LINEAR!r}, "
                    "names of layers and patterns such as 're:.*down_proj'"
                )
            else:
                by_name.append(LayerRule(target_pattern(target), scheme))
    return QuantFacts(METHOD, (*rules, *by_name, *by_class), _read_cache_dtype(keys))


def _read_cache_dtype(keys: ConfigReader) -> str | None:
    """Return the KV cache dtype of `kv_cache_scheme`."""
    scheme = keys.get("kv_cache_scheme")
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        raise keys.wrong("kv_cache_scheme", "an object")
    if (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
        raise ConfigError(
            f"{keys.source}: kv_cache_scheme has {scheme.get('type')} keys and values of"
            f" {scheme.get('num_bits')} bits; float of 8 bits are supported"
        )
    return "fp8_e4m3"


def _read_groups(keys: ConfigReader) -> list[ConfigReader]:
    groups: Any = keys.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise keys.wrong("config_groups", "an object of objects")
    return [ConfigReader(f"{keys.source}: {name}", group) for name, group in groups.items()]


def _read_scheme(group: ConfigReader, format: Any) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    for key, value in (("weights", weights), ("input_activations", inputs)):
        if value is not None and not isinstance(value, dict):
            raise group.wrong(key, "an object")
        inner = ConfigReader(f"{group.source}: {key}", value or {})
        for name, kind in _KINDS.items():
            if inner.get(name) is not None and type(inner.get(name)) is not kind:
                raise inner.wrong(name, "a whole number" if kind is int else "a word")
    scheme = None
    if weights and not group.get("output_activations"):
        by_type = {("float", 8): _fp8, ("int", 8): _int8, ("int", 4): _int8}
        reader = by_type.get(_type(weights)) if format in _FORMATS else _block_float
        scheme = reader(weights, inputs, format) if reader else None
    if scheme is None:
        raise ConfigError(
            f"{group.source} stores {_describe(weights, 'weights')} and "
            f"{_describe(inputs, 'input_activations')} in the format {format!r}, which is not supported; "
            f"{_KNOWN}"
        )
    return scheme


def _describe(args: Mapping[str, Any] | None, what: str) -> str:
    if not args:
        return f"no {what}"
    asymmetric = "" if args.get("symmetric", True) else "asymmetric "
    kind = f"{args.get('type', 'int')}, by {_granularity(args)}"
    return f"{asymmetric}{what} of {args.get('num_bits', 8)} bits ({kind})"


def _granularity(args: Mapping[str, Any]) -> str:
    """Return the granularity of the scales, which follows from the group size if no strategy is set."""
    size = args.get("group_size")
    implied = "tensor" if size is None else "group" if size > 0 else "channel"
    return str(args.get("strategy") or implied)


def _block_float(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, format: str) -> Scheme | None:
    if weights.get("type") != "float" or not weights.get("symmetric", True):
        return None
    key = format, _type(weights)[1], _granularity(weights), weights.get("group_size")
    return _BLOCK_FLOATS.get(key)


def _fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, format: str) -> Scheme | None:
    by = _granularity(weights)
    kinds: dict[str, Literal["tensor", "channel", "block"]]
    kinds = {"tensor": "tensor", "channel": "channel", "block": "block"}
    acts: dict[Any, Literal["token", "tensor", "static", "group", "none"]]
    acts = {
        None: "none",
        ("token", True): "token",
        ("tensor", True): "tensor",
        ("tensor", False): "static",
        ("group", True): "group",
    }
    activations = acts.get(inputs and (_granularity(inputs), bool(inputs.get("dynamic"))))
    if (
        by not in kinds
        or activations is None
        or format == _PACKED
        or (inputs and _type(inputs) != ("float", 8))
    ):
        return None
    block = re.fullmatch(r"\D*(\d+)\D+(\d+)\D*", str(weights.get("block_structure") or (128, 128)))
    return None if block is None else Fp8(kinds[by], activations, (int(block[1]), int(block[2])))


def _int8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, format: str) -> Scheme | None:
    """Read int weights of 8 or 4 bits, packed or with a byte for each weight."""
    if format == _PACKED:
        return _grouped(weights, inputs)
    by = _granularity(weights)
    if by not in ("tensor", "channel") or not weights.get("symmetric", True):
        return None
    kind: Literal["tensor", "channel"] = "tensor" if by == "tensor" else "channel"
    if not inputs:
        return Int8(kind, "none")
    if _type(inputs) != ("int", 8) or _granularity(inputs) not in ("token", "tensor"):
        return None
    return Int8(kind, "token" if inputs.get("dynamic") else "static", bool(inputs.get("symmetric", True)))


def _grouped(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Scheme | None:
    by = _granularity(weights)
    intended: dict[tuple[str, int], Literal["fp8", "int8"]] = {("float", 8): "fp8", ("int", 8): "int8"}
    if by not in ("group", "channel") or (inputs and _type(inputs) not in intended):
        return None
    return Grouped(
        bits=weights.get("num_bits", 8),
        group=-1 if by == "channel" else weights.get("group_size") or -1,
        symmetric=bool(weights.get("symmetric", True)),
        act_order=weights.get("actorder") not in _IN_ORDER,
        layout="compressed",
        intended_inputs=intended[_type(inputs)] if inputs else None,
    )


def _type(args: Mapping[str, Any]) -> tuple[str, int]:
    """Return the type and the number of bits of quantized values."""
    return args.get("type", "int"), args.get("num_bits", 8)


_KINDS = {"num_bits": int, "group_size": int, "type": str, "strategy": str}
