"""AutoRound: weights in the layouts of GPTQ and AWQ, with settings for single layers."""

import re
from typing import Any, Literal

from quire.checkpoint.quant.awq import group_size
from quire.checkpoint.quant.facts import LayerRule, QuantFacts, layer_pattern
from quire.checkpoint.quant.gptq import change_scheme, check_pattern
from quire.checkpoint.quant.schemes import BlockFloat, Grouped, Scheme
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

METHOD = "auto-round"
_PREFIX = "auto_round:"
_LAYOUTS: dict[str, Literal["gptq", "awq"]]
_LAYOUTS = {"auto_gptq": "gptq", "gptq": "gptq", "auto_awq": "awq", "awq": "awq"}
"""Weight layouts by packing_format (without its prefix `auto_round:`)."""
_MX = "llm_compressor"
_BLOCK_FLOATS: dict[str, Scheme] = {
    "mx_fp": BlockFloat("mxfp4", "weight_packed"),
    "mx_fp4": BlockFloat("mxfp4", "weight_packed"),
    "mx_fp8": BlockFloat("mxfp8"),
}
"""Schemes by data_type; weights are packed as in compressed-tensors."""
_UNQUANTIZED_BITS = 16
_WILDCARD = re.compile(r"[*+?^$\[\]()|\\{}]")


def read_auto_round(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of the layers in `block_name_to_quantize` (by default of all layers), and the changes
    for single layers in `extra_config`."""
    scheme = _read_scheme(keys)
    extra: Any = keys.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(layer, dict) for layer in extra.values()):
        raise keys.wrong("extra_config", "an object with the settings of each layer")
    readers = {name: ConfigReader(f"{keys.source}: {name}", layer) for name, layer in extra.items()}
    rules = [LayerRule(_pattern(keys, name), _change(scheme, layer)) for name, layer in readers.items()]
    blocks = _read_blocks(keys)
    main = LayerRule(layer_pattern(*blocks) if blocks else "", scheme)
    head = [] if blocks or keys.flag("quant_lm_head") else [LayerRule(layer_pattern("lm_head"), None)]
    return QuantFacts(METHOD, (*rules, *head, main))


def _read_scheme(keys: ConfigReader) -> Scheme:
    packing = str(keys.get("packing_format") or f"{_PREFIX}auto_gptq").removeprefix(_PREFIX)
    data_type = str(keys.get("data_type") or "int")
    if packing in _LAYOUTS and data_type == "int":
        return Grouped(
            keys.size("bits"),
            group_size(keys, "group_size"),
            symmetric=keys.flag("sym", True),
            act_order=False,
            layout=_LAYOUTS[packing],
        )
    if packing == _MX and data_type in _BLOCK_FLOATS:
        is_8_bit = data_type == "mx_fp" and keys.get("bits") == 8
        return _BLOCK_FLOATS["mx_fp8" if is_8_bit else data_type]
    raise ConfigError(
        f"{keys.source}: the packing_format {keys.get('packing_format')!r} with the data_type {data_type!r} "
        f"is not supported; {_PREFIX}auto_gptq and {_PREFIX}auto_awq with int are, and {_PREFIX}{_MX} with "
        "mx_fp4 or mx_fp8"
    )


def _read_blocks(keys: ConfigReader) -> list[str]:
    """Return the names of the blocks of layers that are quantized, stored as a list or with commas; empty:
    all are."""
    blocks = keys.get("block_name_to_quantize") or keys.get("to_quant_block_names") or []
    if isinstance(blocks, str):
        return [name.strip() for name in blocks.split(",")]
    if not isinstance(blocks, list) or not all(isinstance(name, str) for name in blocks):
        raise keys.wrong("block_name_to_quantize", "a name or a list of names")
    return blocks


def _pattern(keys: ConfigReader, name: str) -> str:
    """Return the regular expression of a key of `extra_config`, which is a layer name or a regular
    expression."""
    if not _WILDCARD.search(name):
        return layer_pattern(name)
    return check_pattern(name, f"{keys.source}: extra_config", name)


def _change(scheme: Scheme, layer: ConfigReader) -> Scheme | None:
    """Return `scheme` changed by the settings of a single layer; None: the layer is not quantized."""
    if layer.size("bits", 1) >= _UNQUANTIZED_BITS:
        return None
    return change_scheme(scheme, layer) if isinstance(scheme, Grouped) else scheme
