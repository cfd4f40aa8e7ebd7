"""MXFP4: the experts of gpt-oss as published."""

import re

from quire.checkpoint.quant.facts import LayerRule, QuantFacts
from quire.checkpoint.quant.schemes import Mxfp4
from quire.checkpoint.reader import ConfigReader


def read_mxfp4(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of the experts; other layers and skipped modules are not quantized."""
    skipped = keys.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise keys.wrong("modules_to_not_convert", "a list of names")
    plain = (LayerRule(rf"(^|\.){re.escape(name)}(\.|$)".replace(r"\*", r"[^.]*"), None) for name in skipped)
    return QuantFacts("mxfp4", (*plain, LayerRule(r"\.experts\.", Mxfp4())))
