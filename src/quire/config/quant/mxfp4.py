"""mxfp4: the experts of gpt-oss as they were published."""

import re

from quire.config.keys import Keys
from quire.config.quant.facts import QuantFacts, Rule
from quire.config.quant.schemes import Mxfp4


def read_mxfp4(said: Keys) -> QuantFacts:
    """Experts alone are stored like this, but for those that the list of modules leaves out."""
    skipped = said.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise said.wrong("modules_to_not_convert", "a list of names")
    plain = (Rule(rf"(^|\.){re.escape(name)}(\.|$)".replace(r"\*", r"[^.]*"), None) for name in skipped)
    return QuantFacts("mxfp4", (*plain, Rule(r"\.experts\.", Mxfp4())))
