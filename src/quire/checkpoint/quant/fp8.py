"""FP8 checkpoints: DeepSeek and AutoFP8 (`fp8`), FBGEMM and ModelOpt."""

import fnmatch

from quire.checkpoint.quant.facts import LayerRule, QuantFacts, all_but
from quire.checkpoint.quant.schemes import Fp8
from quire.checkpoint.reader import ConfigReader

_BLOCK = [128, 128]


def read_fp8(keys: ConfigReader) -> QuantFacts:
    """Read `fp8`: one scale per tensor or per block."""
    activations = keys.get("activation_scheme") or "dynamic"
    if activations not in ("static", "dynamic"):
        raise keys.wrong("activation_scheme", "'dynamic' or 'static'")
    block = keys.get("weight_block_size")
    if block not in (None, _BLOCK):
        raise keys.wrong("weight_block_size", f"{_BLOCK}, or null for one scale per tensor")
    if block is None:
        scheme = Fp8("tensor", "static" if activations == "static" else "token")
    elif activations == "static":
        raise keys.wrong("activation_scheme", "'dynamic', since weights have a scale per block")
    else:
        scheme = Fp8("block", "group", scale_name="weight_scale_inv")
    return QuantFacts("fp8", all_but(_skipped(keys, "modules_to_not_convert", "ignored_layers"), scheme))


def read_fbgemm(keys: ConfigReader) -> QuantFacts:
    """Read FBGEMM: one scale per output channel."""
    return QuantFacts(
        "fbgemm_fp8", all_but(_skipped(keys, "modules_to_not_convert"), Fp8("channel", "token"))
    )


def read_modelopt(keys: ConfigReader) -> QuantFacts:
    """Read ModelOpt: one scale per tensor. Names of excluded layers may have wildcards; the settings may be
    nested in `quantization`."""
    if isinstance(inner := keys.get("quantization"), dict):
        keys = ConfigReader(f"{keys.source}: quantization", inner)
    if keys.get("quant_algo") != "FP8":
        raise keys.wrong("quant_algo", "'FP8', the only supported format of ModelOpt")
    names = _skipped(keys, "ignore", "exclude_modules")
    wild = (LayerRule(fnmatch.translate(name), None) for name in names if "*" in name)
    whole = [name for name in names if "*" not in name]
    return QuantFacts("modelopt", (*wild, *all_but(whole, Fp8("tensor", "static"))))


def _skipped(keys: ConfigReader, *names: str) -> list[str]:
    """Return the layers that are not quantized."""
    skipped: list[str] = []
    for name in names:
        layers = keys.get(name) or []
        if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
            raise keys.wrong(name, "a list of names of layers")
        skipped += layers
    return skipped
