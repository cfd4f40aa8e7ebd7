"""torchao: the settings that transformers writes into config.json, for checkpoints in safetensors."""

from typing import Any, Literal

from quire.checkpoint.quant.facts import LayerRule, QuantFacts, all_but, target_pattern
from quire.checkpoint.quant.schemes import Fp8, Grouped, Int8, Scheme
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

METHOD = "torchao"
_BY_MODULE = ("FqnToConfig", "ModuleFqnToConfig")
_SUPPORTED = (
    "supported are Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig,"
    " Float8DynamicActivationFloat8WeightConfig, IntxWeightOnlyConfig and"
    " Int8DynamicActivationIntxWeightConfig, with weights by row or tensor, of Intx and Int8WeightOnlyConfig"
    " by row or group; Int4WeightOnlyConfig and Float8DynamicActivationInt4WeightConfig packed as PLAIN or"
    " TILE_PACKED_TO_4D"
)
_FP8_INT4 = "Float8DynamicActivationInt4WeightConfig"
_INT4_LAYOUTS: dict[str, Literal["torchao_pairs", "torchao_tiles"]] = {
    "plain": "torchao_pairs",
    "tile_packed_to_4d": "torchao_tiles",
}
"""Layouts of 4-bit weights by packing format."""
_GRANULARITIES: dict[str, Literal["tensor", "channel"]] = {"PerRow": "channel", "PerTensor": "tensor"}


def read_torchao(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of all layers, or of each layer by name."""
    types = keys.get("quant_type")
    settings = types.get("default") if isinstance(types, dict) else None
    if not isinstance(settings, dict) or len(types) != 1:
        raise keys.wrong("quant_type", "an object with the key default, as torchao 0.14 and later write it")
    source = f"{keys.source}: quant_type"
    skipped = keys.names("modules_to_not_convert")
    if settings.get("_type") not in _BY_MODULE:
        return QuantFacts(METHOD, all_but(skipped, _read_scheme(source, settings)))
    data = _data(source, settings)
    by_name = data.get("fqn_to_config") or data.get("module_fqn_to_config")
    if not isinstance(by_name, dict):
        raise ConfigError(f"{source} has no fqn_to_config")
    rules = [
        LayerRule(target_pattern(name), entry and _read_scheme(f"{source}: {name}", entry))
        for name, entry in by_name.items()
        if name != "_default"
    ]
    default = by_name.get("_default")
    rest = all_but(skipped, default and _read_scheme(f"{source}: _default", default))
    return QuantFacts(METHOD, (*rules, *rest))


def _data(source: str, settings: Any) -> dict[str, Any]:
    data = settings.get("_data") if isinstance(settings, dict) else None
    if not isinstance(data, dict):
        raise ConfigError(f"{source} is {settings!r}, expected an object with _type and _data")
    return data


def _read_scheme(source: str, settings: Any) -> Scheme:
    data = _data(source, settings)
    kind, version = str(settings.get("_type")), settings.get("_version")
    scheme = None
    if kind.startswith("Int8") and kind.endswith(("Int8WeightConfig", "8WeightOnlyConfig")):
        scheme = _int8(data, dynamic=kind.startswith("Int8Dynamic"))
    elif kind.startswith("Float8") and kind.endswith(("Float8WeightConfig", "8WeightOnlyConfig")):
        scheme = _fp8(data, dynamic=kind.startswith("Float8Dynamic"))
    elif kind in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"):
        scheme = _grouped(data, dynamic=kind.startswith("Int8Dynamic"))
    elif kind in ("Int4WeightOnlyConfig", _FP8_INT4):
        scheme = _int4(data, has_fp8_inputs=kind == _FP8_INT4)
    if scheme is None or version != (1 if kind == _FP8_INT4 else 2):
        raise ConfigError(
            f"{source} is {kind} of version {version} with {str(data):.300}, which is not supported; "
            f"{_SUPPORTED}, in version 2 (torchao 0.14 and later)"
        )
    return scheme


def _type(entry: Any) -> str:
    """Return the name of a nested setting: a class name, or a value of an enumeration."""
    if not isinstance(entry, dict):
        return ""
    inner = entry.get("_data")
    return inner if isinstance(inner, str) else str(entry.get("_type"))


def _granularity(entry: Any) -> Literal["tensor", "channel"] | None:
    """Return the granularity of the weight scales; None: it is not supported. In a list, the first entry is
    that of activations and the last that of weights."""
    last = entry[-1] if isinstance(entry, list) and entry else entry
    return "channel" if last is None else _GRANULARITIES.get(_type(last))


def _int8(data: dict[str, Any], *, dynamic: bool) -> Scheme | None:
    size = _group_size(data.get("granularity")) or data.get("group_size")
    if size is not None and not dynamic:
        return Grouped(8, size, True, False, "torchao") if isinstance(size, int) else None
    weights = _granularity(data.get("granularity"))
    if weights is None or size is not None:
        return None
    if not dynamic:
        return Int8(weights, "none")
    return Int8(weights, "token", symmetric=_type(data.get("act_mapping_type")) != "ASYMMETRIC")


def _fp8(data: dict[str, Any], *, dynamic: bool) -> Scheme | None:
    weights = _granularity(data.get("granularity"))
    packed = _type(data.get("packing_format")) or "PLAIN"
    if weights is None or _type(data.get("weight_dtype")) != "float8_e4m3fn" or packed != "PLAIN":
        return None
    return Fp8(weights, "none" if not dynamic else "token" if weights == "channel" else "tensor")


def _int4(data: dict[str, Any], *, has_fp8_inputs: bool) -> Scheme | None:
    packed = data.get("int4_packing_format")
    layout = _INT4_LAYOUTS.get((packed if isinstance(packed, str) else _type(packed) or "plain").lower())
    size = 128 if has_fp8_inputs else data.get("group_size", 128)
    if layout is None or not isinstance(size, int) or data.get("int4_tile_packed_ntile", 8) != 8:
        return None
    return Grouped(4, size, False, False, layout, "fp8" if has_fp8_inputs else None)


def _group_size(granularity: Any) -> Any:
    """Return the number of inputs per group; None: the granularity has no groups."""
    inner = granularity.get("_data") if _type(granularity) == "PerGroup" else None
    return inner.get("group_size") if isinstance(inner, dict) else None


def _grouped(data: dict[str, Any], *, dynamic: bool) -> Scheme | None:
    bits = {f"int{bits}": bits for bits in range(1, 9)}.get(_type(data.get("weight_dtype")))
    granularity: Any = data.get("weight_granularity" if dynamic else "granularity")
    packed = _type(data.get("intx_packing_format")) or "UNPACKED_TO_INT8"
    is_by_row = _type(granularity) in ("PerRow", "PerAxis")
    size = -1 if is_by_row else _group_size(granularity)
    if bits is None or packed != "UNPACKED_TO_INT8" or not isinstance(size, int):
        return None
    return Grouped(bits, size, False, False, "torchao", "int8" if dynamic else None)
