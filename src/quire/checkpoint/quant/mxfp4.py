"""MXFP4: the experts of gpt-oss as published. MXFP8: the linear layers of MiniMax models."""

import re

from quire.checkpoint.quant.facts import LayerRule, QuantFacts, all_but
from quire.checkpoint.quant.schemes import BlockFloat, Mxfp4
from quire.checkpoint.reader import ConfigReader


def read_mxfp4(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of the experts; other layers and skipped modules are not quantized."""
    skipped = keys.names("modules_to_not_convert")
    plain = (LayerRule(rf"(^|\.){re.escape(name)}(\.|$)".replace(r"\*", r"[^.]*"), None) for name in skipped)
    return QuantFacts("mxfp4", (*plain, LayerRule(r"\.experts\.", Mxfp4())))


def read_mxfp8(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of all linear layers except the skipped ones."""
    skipped = keys.names("ignored_layers") + keys.names("modules_to_not_convert")
    return QuantFacts("mxfp8", all_but(skipped, BlockFloat("mxfp8")))
