"""bitsandbytes: the settings that transformers writes into config.json."""

from typing import Any, Literal

from quire.checkpoint.quant.facts import QuantFacts, all_but
from quire.checkpoint.quant.schemes import BitsAndBytes
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

METHOD = "bitsandbytes"
_KINDS: dict[Any, Literal["nf4", "fp4"]] = {"nf4": "nf4", "fp4": "fp4"}


def read_bitsandbytes(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of all linear layers except the skipped ones. `llm_int8_threshold` has no effect, since
    inputs are not quantized."""
    return QuantFacts(METHOD, all_but(keys.names("llm_int8_skip_modules"), _read_scheme(keys)))


def _read_scheme(keys: ConfigReader) -> BitsAndBytes:
    if keys.flag("load_in_8bit") or keys.flag("_load_in_8bit"):
        return BitsAndBytes("int8")
    if not (keys.flag("load_in_4bit") or keys.flag("_load_in_4bit")):
        raise ConfigError(
            f"{keys.source} has neither load_in_4bit nor load_in_8bit; one of them must be true"
        )
    kind = str(keys.get("bnb_4bit_quant_type") or "fp4")
    if kind not in _KINDS:
        raise keys.wrong("bnb_4bit_quant_type", "nf4 or fp4")
    storage = keys.get("bnb_4bit_quant_storage")
    if storage not in (None, "uint8"):
        raise keys.wrong("bnb_4bit_quant_storage", "uint8: save the model again with that")
    return BitsAndBytes(_KINDS[kind], keys.flag("bnb_4bit_use_double_quant"))
