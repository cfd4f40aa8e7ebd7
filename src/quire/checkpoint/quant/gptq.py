"""GPTQ: 4- or 8-bit weights with a scale and a zero point per group of inputs, optionally with act-order."""

import re
from dataclasses import replace

from quire.checkpoint.quant.awq import group_size
from quire.checkpoint.quant.facts import LayerRule, QuantFacts, all_but
from quire.checkpoint.quant.schemes import Grouped
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_FORMATS = "gptq", "gptq_v2"


def read_gptq(keys: ConfigReader) -> QuantFacts:
    named = "marlin" if keys.flag("is_marlin_format") else str(keys.get("checkpoint_format") or "gptq")
    if named not in _FORMATS:
        raise ConfigError(
            f"{keys.source}: checkpoint_format is {named!r}, which is not supported; "
            f"{' and '.join(_FORMATS)} are: save the model again in one of them"
        )
    scheme = Grouped(
        keys.size("bits"),
        group_size(keys, "group_size"),
        symmetric=keys.flag("sym", True),
        act_order=keys.flag("desc_act"),
        layout="gptq_v2" if named == "gptq_v2" else "gptq",
    )
    skipped = () if keys.flag("lm_head") else ("lm_head",)
    return QuantFacts("gptq", (*_read_dynamic(keys, scheme), *all_but(skipped, scheme)))


def _read_dynamic(keys: ConfigReader, scheme: Grouped) -> tuple[LayerRule, ...]:
    """Read `dynamic`: regular expressions for the beginning of layer names, each with changed settings.
    Layers that match an expression after `-:` are not quantized."""
    patterns = keys.get("dynamic") or {}
    if not isinstance(patterns, dict):
        raise keys.wrong("dynamic", "an object of patterns")
    rules = []
    for pattern, changes in patterns.items():
        regex = f"^(?:{re.sub(r'^[+-]:', '', pattern)})"
        check_pattern(regex, f"{keys.source}: dynamic", pattern)
        changed = None
        if not pattern.startswith("-:"):
            if not isinstance(changes or {}, dict):
                raise keys.wrong("dynamic", "an object of patterns with an object each")
            changed = change_scheme(scheme, ConfigReader(f"{keys.source}: dynamic", changes or {}))
        rules.append(LayerRule(regex, changed))
    return tuple(rules)


def check_pattern(pattern: str, source: str, written: str) -> str:
    """Return `pattern` if it is a valid regular expression; otherwise raise a ConfigError that quotes
    `written`, the form of the pattern in the config `source`."""
    try:
        return re.compile(pattern).pattern
    except re.error as error:
        raise ConfigError(f"{source} has {written!r}, which is not a valid pattern: {error}") from error


def change_scheme(scheme: Grouped, changed: ConfigReader) -> Grouped:
    """Return `scheme` with the settings in `changed`, which apply to single layers."""
    return replace(
        scheme,
        bits=changed.size("bits", scheme.bits),
        group=scheme.group if changed.get("group_size") is None else group_size(changed, "group_size"),
        symmetric=changed.flag("sym", scheme.symmetric),
        act_order=changed.flag("desc_act", scheme.act_order),
    )
