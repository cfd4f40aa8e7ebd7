"""HQQ: the settings that transformers writes into config.json, and checkpoints that hqq itself has saved."""

import re
from pathlib import Path
from typing import Any

from quire.checkpoint.quant.facts import LayerRule, QuantFacts, all_but
from quire.checkpoint.quant.schemes import Hqq
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

METHOD = "hqq"
FILE = "qmodel.pt"
"""Weight file that hqq itself writes; it contains the settings of each layer as well."""
_HEADER_BYTES = 100 << 20
"""Maximum size of the header of a safetensors file."""
HQQ_AS_STORED = QuantFacts(METHOD, all_but((), Hqq()))
_STORED_BITS = {8: 8, 6: 8, 5: 8, 4: 4, 3: 3, 2: 2, 1.58: 2, 1: 1}
"""Bits of a stored value, by nbits of the settings."""


def read_hqq(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of all layers, or one scheme for each tag: a layer name without `model`, `layers` and
    numbers."""
    settings = keys.get("quant_config")
    if not isinstance(settings, dict) or not settings:
        raise keys.wrong("quant_config", "an object with weight_quant_params, or one for each kind of layer")
    skipped = tuple(LayerRule(_tag_pattern(tag), None) for tag in keys.names("skip_modules"))
    source = f"{keys.source}: quant_config"
    if "weight_quant_params" in settings:
        return QuantFacts(METHOD, (*skipped, LayerRule("", _read_scheme(source, settings))))
    rules = (
        LayerRule(_tag_pattern(tag), entry and _read_scheme(f"{source}: {tag}", entry))
        for tag, entry in settings.items()
    )
    return QuantFacts(METHOD, (*skipped, *rules))


def is_saved_by_hqq(path: Path) -> bool:
    """Whether the weights in a directory were saved by hqq itself, which writes no quantization_config."""
    if (path / FILE).is_file():
        return True
    first = next(filter(Path.is_file, sorted(path.glob("*.safetensors"))), None)
    if first is None:
        return False
    with first.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return b'.W_q":' in file.read(min(size, _HEADER_BYTES))


def _tag_pattern(tag: str) -> str:
    names = tag.replace("language_model.", "").split(".")
    return r"(^|\.)" + r"\.(?:\d+\.)?".join(map(re.escape, names)) + "$"


def _read_scheme(source: str, settings: Any) -> Hqq:
    params = settings.get("weight_quant_params") if isinstance(settings, dict) else None
    if not isinstance(params, dict):
        raise ConfigError(f"{source} is {settings!r}, expected an object with weight_quant_params")
    keys = ConfigReader(f"{source}: weight_quant_params", params)
    bits, axis = params.get("nbits"), params.get("axis", 0)
    if isinstance(bits, bool) or bits not in _STORED_BITS:
        raise keys.wrong("nbits", f"one of {', '.join(map(str, _STORED_BITS))}")
    if isinstance(axis, bool) or axis not in (0, 1):
        raise keys.wrong("axis", "0 or 1")
    if not keys.flag("channel_wise", True):
        raise keys.wrong("channel_wise", "true: one scale for a whole tensor is not supported")
    if keys.flag("view_as_float"):
        raise keys.wrong("view_as_float", "false: save the model again with that")
    group = -1 if params.get("group_size") is None else keys.size("group_size")
    return Hqq(_STORED_BITS[bits], group, axis)
