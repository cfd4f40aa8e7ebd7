"""GPTQ: 4 or 8 bits, groups of inputs with a scale and a zero, perhaps not of neighbours."""

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
    return QuantFacts("gptq", (*_dynamic(keys, scheme), *all_but(skipped, scheme)))


def _dynamic(keys: ConfigReader, scheme: Grouped) -> tuple[LayerRule, ...]:
    """Patterns of how names begin, after `-:` where layers are plain, with what is other than elsewhere."""
    said = keys.get("dynamic") or {}
    if not isinstance(said, dict):
        raise keys.wrong("dynamic", "an object of patterns")
    rules = []
    for pattern, changes in said.items():
        begins = f"^(?:{re.sub(r'^[+-]:', '', pattern)})"
        try:
            re.compile(begins)
        except re.error as error:
            raise ConfigError(
                f"{keys.source}: dynamic has {pattern!r}, which is no pattern: {error}"
            ) from error
        is_plain = pattern.startswith("-:")
        rules.append(LayerRule(begins, None if is_plain else _changed(keys, scheme, changes or {})))
    return tuple(rules)


def _changed(keys: ConfigReader, scheme: Grouped, changes: dict[str, object]) -> Grouped:
    if not isinstance(changes, dict):
        raise keys.wrong("dynamic", "an object of patterns with an object each")
    own = ConfigReader(f"{keys.source}: dynamic", changes)
    return replace(
        scheme,
        bits=own.size("bits", scheme.bits),
        group=scheme.group if own.get("group_size") is None else group_size(own, "group_size"),
        symmetric=own.flag("sym", scheme.symmetric),
        act_order=own.flag("desc_act", scheme.act_order),
    )
