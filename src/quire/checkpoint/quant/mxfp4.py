"""mxfp4: the experts of gpt-oss as they were published."""

import re

from quire.checkpoint.quant.facts import LayerRule, QuantFacts
from quire.checkpoint.quant.schemes import Mxfp4
from quire.checkpoint.reader import ConfigReader


def read_mxfp4(said: ConfigReader) -> QuantFacts:
    """Experts alone are stored like this, but for those that the list of modules leaves out."""
    skipped = said.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise said.wrong("modules_to_not_convert", "a list of names")
    plain = (LayerRule(rf"(^|\.){re.escape(name)}(\.|$)".replace(r"\*", r"[^.]*"), None) for name in skipped)
    return QuantFacts("mxfp4", (*plain, LayerRule(r"\.experts\.", Mxfp4())))
