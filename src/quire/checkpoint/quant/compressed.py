"""compressed-tensors: what llm-compressor writes into config.json."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from quire.checkpoint.quant.facts import LayerRule, QuantFacts
from quire.checkpoint.quant.schemes import Fp8, Grouped, Int8, Scheme
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

METHOD = "compressed-tensors"
_LINEAR = "Linear"
"""The one class of layers whose weights are stored like this."""
_PACKED = "pack-quantized"
_FORMATS = (_PACKED, "int-quantized", "float-quantized", "naive-quantized")
_DENSE = (None, "dense")
_KNOWN = (
    "supported are float weights of 8 bits by tensor, channel or block, int weights of 8 bits by tensor or "
    f"channel, and int weights of 4 or 8 bits by group or channel in {_PACKED} without input_activations"
)
_IN_ORDER = (None, False, "weight", "static")
"""What actorder says where a group's inputs are neighbours."""


def read_compressed(said: ConfigReader) -> QuantFacts:
    """The scheme of each group, for the layers that it targets and `ignore` does not name."""
    for key, what in (("sparsity_config", "sparse weights"), ("transform_config", "transformed weights")):
        held = said.get(key)
        if held and not (isinstance(held, dict) and held.get("format", held.get("config_groups")) in _DENSE):
            raise ConfigError(
                f"{said.source}: {key} says {what}, which is not supported; "
                "use a checkpoint that is quantized alone, or the dense one"
            )
    rules = [LayerRule(_pattern(name), None) for name in _names(said, "ignore")]
    by_name, by_class = [], []
    for name, group in _groups(said).items():
        scheme = _scheme(group, group.get("format") or said.get("format"), name)
        for target in _names(group, "targets"):
            if target == _LINEAR:
                by_class.append(LayerRule("", scheme))
            elif re.fullmatch(r"[A-Z]\w*", target):
                raise ConfigError(
                    f"{group.source}: the target {target!r} is not supported; supported are {_LINEAR!r}, "
                    "names of layers and patterns such as 're:.*down_proj'"
                )
            else:
                by_name.append(LayerRule(_pattern(target), scheme))
    return QuantFacts(METHOD, (*rules, *by_name, *by_class), _cache(said))


def _cache(said: ConfigReader) -> str | None:
    """The type that `kv_cache_scheme` says."""
    scheme = said.get("kv_cache_scheme")
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        raise said.wrong("kv_cache_scheme", "an object")
    if (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
        raise ConfigError(
            f"{said.source}: kv_cache_scheme says {scheme.get('type')} keys and values of"
            f" {scheme.get('num_bits')} bits; float of 8 bits are supported"
        )
    return "fp8_e4m3"


def _groups(said: ConfigReader) -> dict[str, ConfigReader]:
    groups: Any = said.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise said.wrong("config_groups", "an object of objects")
    return {name: ConfigReader(f"{said.source}: {name}", group) for name, group in groups.items()}


def _names(keys: ConfigReader, key: str) -> list[str]:
    names: Any = keys.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise keys.wrong(key, "a list of names")
    return names


def _pattern(name: str) -> str:
    """Of a layer's name, or after `re:` of how it begins. The text part of a model that also sees is named
    without the name of that part here."""
    if name.startswith("re:"):
        try:
            return re.compile(f"^(?:{name[3:]})").pattern
        except re.error as error:
            raise ConfigError(f"{METHOD}: {name!r} is not a pattern: {error}") from error
    return rf"(^|\.){re.escape(name.replace('language_model.', ''))}$"


def _scheme(group: ConfigReader, format: Any, name: str) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    for key, held in (("weights", weights), ("input_activations", inputs)):
        if held is not None and not isinstance(held, dict):
            raise group.wrong(key, "an object")
        inner = ConfigReader(f"{group.source}: {key}", held or {})
        for name, kind in _KINDS.items():
            if inner.get(name) is not None and type(inner.get(name)) is not kind:
                raise inner.wrong(name, "a whole number" if kind is int else "a word")
    scheme = None
    if weights and format in _FORMATS and not group.get("output_activations"):
        reader = {("float", 8): _fp8, ("int", 8): _int8, ("int", 4): _grouped}.get(
            (weights.get("type", "int"), weights.get("num_bits", 8))
        )
        scheme = reader(weights, inputs, format) if reader else None
    if scheme is None:
        raise ConfigError(
            f"{group.source} stores {_told(weights, 'weights')} and {_told(inputs, 'input_activations')} in "
            f"the format {format!r}, which is not supported; {_KNOWN}"
        )
    return scheme


def _told(of: Mapping[str, Any] | None, what: str) -> str:
    if not of:
        return f"no {what}"
    uneven = "" if of.get("symmetric", True) else "asymmetric "
    return f"{uneven}{what} of {of.get('num_bits', 8)} bits ({of.get('type', 'int')}, by {_by(of)})"


def _by(of: Mapping[str, Any]) -> str:
    """What has one scale. Without a word it follows from the size of groups."""
    size = of.get("group_size")
    implied = "tensor" if size is None else "group" if size > 0 else "channel"
    return str(of.get("strategy") or implied)


def _fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, format: str) -> Scheme | None:
    by = _by(weights)
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
    narrowed = acts.get(inputs and (_by(inputs), bool(inputs.get("dynamic"))))
    if by not in kinds or narrowed is None or format == _PACKED or (inputs and not _like(weights, inputs)):
        return None
    block = re.fullmatch(r"\D*(\d+)\D+(\d+)\D*", str(weights.get("block_structure") or (128, 128)))
    return None if block is None else Fp8(kinds[by], narrowed, (int(block[1]), int(block[2])))


def _int8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, format: str) -> Scheme | None:
    if format == _PACKED:
        return _grouped(weights, inputs, format)
    by = _by(weights)
    if by not in ("tensor", "channel") or not weights.get("symmetric", True):
        return None
    kind: Literal["tensor", "channel"] = "tensor" if by == "tensor" else "channel"
    if not inputs:
        return Int8(kind, "none")
    if not _like(weights, inputs) or _by(inputs) not in ("token", "tensor"):
        return None
    return Int8(kind, "token" if inputs.get("dynamic") else "static", bool(inputs.get("symmetric", True)))


def _grouped(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, format: str) -> Scheme | None:
    by = _by(weights)
    if format != _PACKED or inputs or by not in ("group", "channel"):
        return None
    return Grouped(
        bits=weights.get("num_bits", 8),
        group=-1 if by == "channel" else weights.get("group_size") or -1,
        symmetric=bool(weights.get("symmetric", True)),
        act_order=weights.get("actorder") not in _IN_ORDER,
        layout="compressed",
    )


def _like(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
    """Whether inputs are narrowed to the type of the weights."""
    return all(inputs.get(key, default) == weights.get(key, default) for key, default in _TYPE.items())


_KINDS = {"num_bits": int, "group_size": int, "type": str, "strategy": str}
_TYPE = {"num_bits": 8, "type": "int"}
