"""bitsandbytes: what transformers writes into config.json."""

from typing import Any, Literal

from quire.checkpoint.quant.facts import QuantFacts, all_but
from quire.checkpoint.quant.schemes import BitsAndBytes
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

METHOD = "bitsandbytes"
_KINDS: dict[Any, Literal["nf4", "fp4"]] = {"nf4": "nf4", "fp4": "fp4"}


def read_bitsandbytes(said: ConfigReader) -> QuantFacts:
    """Every linear layer but those that are skipped. From how large a number on an input was computed apart
    (`llm_int8_threshold`) does not matter where inputs are not rounded."""
    skipped: Any = said.get("llm_int8_skip_modules") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise said.wrong("llm_int8_skip_modules", "a list of names")
    return QuantFacts(METHOD, all_but(skipped, _scheme(said)))


def _scheme(said: ConfigReader) -> BitsAndBytes:
    if said.flag("load_in_8bit") or said.flag("_load_in_8bit"):
        return BitsAndBytes("int8")
    if not (said.flag("load_in_4bit") or said.flag("_load_in_4bit")):
        raise ConfigError(
            f"{said.source} says neither load_in_4bit nor load_in_8bit; one of them must be true"
        )
    kind = str(said.get("bnb_4bit_quant_type") or "fp4")
    if kind not in _KINDS:
        raise said.wrong("bnb_4bit_quant_type", "nf4 or fp4")
    storage = said.get("bnb_4bit_quant_storage")
    if storage not in (None, "uint8"):
        raise said.wrong("bnb_4bit_quant_storage", "uint8: save the model again with that")
    return BitsAndBytes(_KINDS[kind], said.flag("bnb_4bit_use_double_quant"))
